"""Suites that extend another one, and those of other packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedbench.core.errors import FedbenchError
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import load_suite, parse_suite

BASE = """\
name: base
scenario: longtail
training: {rounds: 3, lr: 0.1}
seeds: [0, 1]
rows:
  - method: fedavg
  - method: fedprox
    set: {fedprox.mu: 0.1}
  - {method: fedprox, label: strong, set: {fedprox.mu: 1.0}}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path


def test_fields_are_laid_over_and_rows_added_replaced_and_left_out(base: Path) -> None:
    (base / "mine.yaml").write_text(
        "extends: base.yaml\nname: mine\ntraining: {rounds: 5}\nscenario: {clients: 8}\nwithout: [fedavg]\n"
        "rows:\n  - {method: moon, set: {backbone: convnet}}\n  - {method: fedprox, set: {fedprox.mu: 0.5}}\n"
    )
    suite = load_suite(str(base / "mine.yaml"))
    assert suite.name == "mine" and suite.seeds == (0, 1)
    assert suite.training == {"rounds": 5, "lr": 0.1}
    assert suite.scenario == {"preset": "longtail", "clients": 8}
    assert [(row.method, row.label, row.set.get("fedprox.mu")) for row in suite.rows] == [
        ("fedprox", "", 0.5),
        ("fedprox", "strong", 1.0),
        ("moon", "", None),
    ]
    # the recorded text says all of it, without the other file
    (base / "base.yaml").unlink()
    again = parse_suite(suite.text, "recorded.yaml")
    assert [spec.run_id for spec in expand(again, Overrides())] == [spec.run_id for spec in expand(suite, Overrides())]


def test_a_single_row_is_left_out_without_brackets(base: Path) -> None:
    (base / "mine.yaml").write_text("extends: base.yaml\nname: mine\nwithout: fedavg\n")
    assert [row.method for row in load_suite(str(base / "mine.yaml")).rows] == ["fedprox", "fedprox"]


def test_a_shipped_suite_can_be_extended_by_name_and_runs_the_same(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: longtail\nname: mine\n")
    ours, theirs = load_suite(str(tmp_path / "mine.yaml")), load_suite("longtail")
    assert [spec.run_id for spec in expand(ours, Overrides())] == [spec.run_id for spec in expand(theirs, Overrides())]


def test_errors_name_the_line_of_the_file_in_which_it_stands(base: Path) -> None:
    file = base / "mine.yaml"
    file.write_text("extends: base.yaml\nname: mine\nrows:\n  - method: moon\n  - method: fedprox\n    sett: {}\n")
    with pytest.raises(FedbenchError, match=r"mine.yaml, line 6, rows.1.sett: unknown field 'sett'"):
        load_suite(str(file))
    file.write_text("extends: base.yaml\nname: mine\nrows:\n  - method: fedprox\n    set: {fedprox.mu: wrong}\n")
    with pytest.raises(FedbenchError, match=r"mine.yaml, line 5, rows.1.set.fedprox.mu: "):
        expand(load_suite(str(file)), Overrides())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: bsae\nname: mine\n", "unknown suite 'bsae'"),
        ("extends: none.yaml\nname: mine\n", "none.yaml' does not exist"),
        ("extends: [base.yaml]\nname: mine\n", "is no suite's name or file"),
        ("extends: base.yaml\nname: mine\nwithout: [fedporx]\n", "unknown row 'fedporx'; did you mean 'fedprox'"),
        ("extends: mine.yaml\nname: mine\n", "does one extend itself"),
        ("extends: longtail\nname: mine\nrows: [{method: fedavg}]\n", "has 2 rows called 'fedavg'"),
        ("name: mine\nwithout: [fedprox]\nrows: [{method: fedavg}]\n", "say which one with `extends`"),
        ("extends: base.yaml\n", "name: field required"),
    ],
)
def test_what_cannot_be_extended_is_refused(base: Path, text: str, message: str) -> None:
    (base / "mine.yaml").write_text(text)
    with pytest.raises(FedbenchError, match=message):
        load_suite(str(base / "mine.yaml"))

"""`fedbench submit`, `verify` and `merge` on a small true result folder, and on forged copies of it."""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from mlflow import MlflowClient

from fedbench.cli.app import main
from fedbench.cli.commands.mapping import _folder_of
from fedbench.core.errors import FedbenchError
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import Scale, load_suite
from fedbench.tracking.schema import SEAL, seal_of, store_uri
from fedbench_boards.exchange.checks import _beside_suite, _notes, check_alike, check_folder
from fedbench_boards.exchange.folder import FILES, MANIFEST, _of_row, digests, read_folder
from fedbench_boards.exchange.merging import _diverged, merge
from fedbench_boards.exchange.verifying import _differences, _ended, drawn
from fedbench_boards.leaderboard.formats import write
from fedbench_boards.leaderboard.reading import board_of_runs, made_by
from fedbench_boards.leaderboard.results import StoredResults, load_curves, load_results

SUITE = """
name: toy
dataset: "embedded?train=240&test=80"
scenario: {imbalance: exponential, imbalance_factor: 4, partition: iid, clients: 2, participation: 1.0}
training: {rounds: 2, local_epochs: 1, batch_size: 32, lr: 0.01, eval_every: 2}
seeds: [0, 1]
rows:
  - {method: fedavg, label: plain}
  - method: fedprox
"""
PROX = "fedprox · clip:embedded"


@dataclass(frozen=True)
class Made:
    """What was made once for all tests."""

    place: Path

    @property
    def suite(self) -> str:
        return str(self.place / "toy.yaml")

    @property
    def store(self) -> str:
        return str(self.place / "store")

    @property
    def cache(self) -> str:
        return str(self.place / "cache")

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.place / "out", to / "out"))


def call(*arguments: str) -> int:
    """`fedbench ARGUMENTS`; its exit code."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["fedbench", *arguments])
        patched.delenv("MLFLOW_TRACKING_URI", raising=False)
        with pytest.raises(SystemExit) as ended:
            main()
    return ended.value.code if isinstance(ended.value.code, int) else 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Two rows at two seeds, run and written."""
    one = Made(tmp_path_factory.mktemp("exchange"))
    Path(one.suite).write_text(SUITE, encoding="utf-8")
    stored = ("--suite", one.suite, "--store", one.store)
    assert call("run", *stored, "--cache-dir", one.cache, "--engine", "in-process") == 0
    assert call("leaderboard", *stored, "--output", str(one.place / "out")) == 0
    return one


def test_a_true_folder_is_in_order(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("submit", str(made.place / "out"), "--suite", made.suite) == 0
    assert "is in order: 4 runs of 2 rows, suite toy version 1, CC-BY-4.0" in capsys.readouterr().out
    manifest = json.loads((made.place / "out" / MANIFEST).read_text("utf-8"))
    assert set(manifest["files"]) == set(FILES)
    assert all(manifest["environment"].values())
    assert str(made.place) not in json.dumps(manifest)


def test_a_folder_may_be_in_ones_home(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert call("leaderboard", "--suite", made.suite, "--store", made.store, "--output", "~/boards") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["boards"]
    assert _folder_of(load_suite(made.suite), Path("~/boards")) == tmp_path / "boards" / "toy"


def test_plain_tables_are_read_and_then_compressed(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made.copy(tmp_path)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    for name in ("results.csv", "leaderboard.csv"):
        (folder / name).write_bytes(gzip.decompress(before[f"{name}.gz"]))
        (folder / f"{name}.gz").unlink()
    plain = ("results.csv", "leaderboard.csv", "leaderboard.md", "index.html")
    in_manifest(files=digests(folder, plain))(folder)
    assert call("leaderboard", "--results", str(folder), "--suite", made.suite) == 0
    assert call("submit", str(folder), "--suite", made.suite) == 0
    assert "its tables are compressed now" in capsys.readouterr().out
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    # what nothing was checked of stays
    (folder / "leaderboard.tex").write_text("a table")
    (folder / "results.csv").write_bytes(gzip.decompress(before["results.csv.gz"]))
    assert call("submit", str(folder), "--suite", made.suite) == 0
    assert "compressed" not in capsys.readouterr().out
    assert (folder / "leaderboard.tex").is_file() and (folder / "results.csv").is_file()


@pytest.mark.parametrize("shape", ["csv", "md", "latex", "table"])
def test_a_folder_is_shown_as_its_store_is(shape: str, made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for place in (("--store", made.store), ("--results", str(made.place / "out"))):
        assert call("leaderboard", "--suite", made.suite, "--format", shape, *place) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "fedprox" in shown[0]


def test_a_folder_is_ranked_by_another_metric(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--suite", made.suite, "--metric", "tail", "--baseline", "fedprox", "--format", "csv")
    shown = []
    for place in (("--store", made.store), ("--results", str(made.place / "out"))):
        assert call("leaderboard", *given, *place) == 0
        shown.append(pd.read_csv(io.StringIO(capsys.readouterr().out)))
    same = ["row", "rank", "headline", "tail_accuracy_mean", "delta_mean", "baseline"]
    pd.testing.assert_frame_equal(shown[0][same], shown[1][same])


@pytest.mark.parametrize("further", [("--output", "x"), ("--format", "html"), ("--target", "3"), ("--store", "x")])
def test_what_only_a_store_gives_is_refused_of_a_folder(
    further: tuple[str, str], made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("leaderboard", "--results", str(made.place / "out"), *further) == 2
    assert "a folder has no curves: --results takes no --output" in " ".join(capsys.readouterr().err.split())


def test_a_suite_that_is_not_installed_is_asked_for(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("submit", str(made.place / "out")) == 2
    assert "give its file with --suite" in capsys.readouterr().err


Frame = pd.DataFrame
Change = Callable[[Path], None]


def _texts(file: Path) -> Frame:
    return pd.read_csv(file, dtype=str, keep_default_na=False)


def edited(name: str, change: Callable[[Frame], Frame | None]) -> Change:
    """A change of one CSV file of a folder."""

    def edit(folder: Path) -> None:
        frame = _texts(folder / name)
        changed = change(frame)
        (frame if changed is None else changed).to_csv(folder / name, index=False)

    return edit


def setting(column: str, value: str, line: int = 0) -> Callable[[Frame], None]:
    def change(frame: Frame) -> None:
        frame.loc[frame.index[line], column] = value

    return change


def raised(column: str, by: float, line: int = 0) -> Callable[[Frame], None]:
    def change(frame: Frame) -> None:
        frame.loc[frame.index[line], column] = repr(float(frame[column].iloc[line]) + by)

    return change


def in_manifest(**values: Any) -> Change:
    def change(folder: Path) -> None:
        content = json.loads((folder / MANIFEST).read_text("utf-8"))
        (folder / MANIFEST).write_text(json.dumps(content | values), encoding="utf-8")

    return change


def both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def rewritten(name: str, pattern: str, by: str) -> Change:
    def change(folder: Path) -> None:
        text = (folder / name).read_text("utf-8")
        assert re.search(pattern, text)
        (folder / name).write_text(re.sub(pattern, by, text, count=1), encoding="utf-8")

    return change


def with_new_digests(folder: Path) -> None:
    """As a forger leaves it who knows of the manifest."""
    in_manifest(files=digests(folder, FILES))(folder)


def other_rate(frame: Frame) -> None:
    settings = json.loads(frame["row_settings"].iloc[0]) | {"training.lr": "0.02"}
    frame.loc[0, "row_settings"] = json.dumps(settings, sort_keys=True)


FAILURE = json.dumps([{"seed": 7, "reason": "out of memory", "run_id": "", "mlflow_id": "", "code": ""}])
FORGED: dict[str, tuple[Change, str]] = {
    "a number in results.csv": (
        edited("results.csv.gz", raised("final/global_accuracy", 5.0)),
        r"global_accuracy_mean is [\d.]+ in leaderboard.csv.gz, and [\d.]+ by results.csv.gz",
    ),
    "a number in leaderboard.csv.gz": (
        edited("leaderboard.csv.gz", raised("tail_accuracy_mean", 1.0)),
        r"tail_accuracy_mean is [\d.]+ in leaderboard.csv.gz",
    ),
    "the mean in both": (
        both(
            edited("results.csv.gz", raised("final/macro_f1", 0.0)),
            edited("results.csv.gz", lambda frame: _all_of(frame, "plain", "final/global_accuracy", [2.0, 0.0])),
            edited("leaderboard.csv.gz", lambda frame: _all_of(frame, "plain", "global_accuracy_mean", [1.0])),
        ),
        r"plain · clip:embedded: global_accuracy_std is",
    ),
    "the rank": (
        edited("leaderboard.csv.gz", setting("rank", "9")),
        r"clip:embedded: rank is 9 in leaderboard.csv.gz",
    ),
    "a number of the Markdown": (
        rewritten("leaderboard.md", r"(\d\d)\.\d ± ", "99.9 ± "),
        r"leaderboard.md is not what leaderboard.csv.gz gives",
    ),
    "a line above the tables": (
        rewritten("leaderboard.md", r"# Leaderboard\n", "# Leaderboard\n\nfedprox is the best.\n"),
        r"leaderboard.md is not what leaderboard.csv.gz gives: it has the line 'fedprox is the best.'",
    ),
    "a command that no run had": (
        rewritten("leaderboard.md", r"(\$ fedbench run) ", r"\1 --seed 7 "),
        r"leaderboard.md is not what leaderboard.csv.gz gives: it lacks the line '\$ fedbench run",
    ),
    "another way of reading": (
        rewritten("leaderboard.md", r"(\$ fedbench leaderboard) ", r"\1 --metric tail "),
        r"leaderboard.md is not what leaderboard.csv.gz gives: it lacks the line '\$ fedbench leaderboard'",
    ),
    "a table that ends too early": (
        lambda folder: (folder / "results.csv.gz").write_bytes((folder / "results.csv.gz").read_bytes()[:900]),
        r"results.csv.gz' can't be read: Compressed file ended",
    ),
    "another version of the suite": (
        edited("results.csv.gz", setting("suite_version", "2")),
        r"seed 0: it is of version 2 of suite 'toy', which is at version 1 here",
    ),
    "a seed that is missing": (
        edited("results.csv.gz", lambda frame: frame.iloc[1:]),
        r"plain · clip:embedded: seed 0 is missing",
    ),
    "a row that is missing": (
        edited("leaderboard.csv.gz", lambda frame: frame[frame["method"] != "fedprox"]),
        r"fedprox · clip:embedded is in results.csv.gz and not in leaderboard.csv.gz",
    ),
    "a row too many": (
        edited("results.csv.gz", lambda frame: frame[frame["method"] != "fedprox"]),
        r"fedprox · clip:embedded is in leaderboard.csv.gz, and results.csv.gz has no run of it",
    ),
    "a run that failed": (
        edited("leaderboard.csv.gz", setting("failures", FAILURE)),
        r"clip:embedded: seed 7 failed: out of memory",
    ),
    "other data": (
        edited("results.csv.gz", setting("data_hash", "1" * 64, line=1)),
        r"its data are not those of the other runs of embedded\?train=240&test=80 \(data_hash 11111111",
    ),
    "a file that is missing": (lambda folder: (folder / "index.html").unlink(), r"has no index.html"),
    "a column that is missing": (
        edited("results.csv.gz", lambda frame: frame.drop(columns="row_settings")),
        r"has no column row_settings",
    ),
    "a run id that does not fit": (
        edited("results.csv.gz", setting("run_id", "0123456789abcdef")),
        r"seed 0: run_id 0123456789abcdef is not that of its recorded settings",
    ),
    "a setting that does not fit": (edited("results.csv.gz", other_rate), r"is not that of its recorded settings"),
    "a row by another name": (
        edited("results.csv.gz", lambda frame: _named(frame, "final · clip:embedded (tuned)")),
        r"by its settings the row is called 'final · clip:embedded'",
    ),
    "no hash of the code": (edited("results.csv.gz", setting("code_hash", "")), r"seed 0: no code_hash is recorded"),
    "two lines of a row": (
        edited("leaderboard.csv.gz", lambda frame: pd.concat([frame.iloc[:1], frame])),
        r"has two lines in leaderboard.csv.gz",
    ),
    "failures that are no list": (
        edited("results.csv.gz", setting("row_settings", "3")),
        r"can't be read as a result folder",
    ),
    "no licence": (in_manifest(licence=" "), r"names no licence"),
    "no environment": (in_manifest(environment={}), r"does not say on which platform"),
}
"""What is changed, with all digests written anew -> the reason."""


def _all_of(frame: Frame, label: str, column: str, by: list[float]) -> None:
    which = frame.index[frame["row"] == f"{label} · clip:embedded"]
    for line, step in zip(which, by, strict=True):
        frame.loc[line, column] = repr(float(frame.loc[line, column]) + step)


def _named(frame: Frame, row: str) -> None:
    frame.loc[frame["method"] == "fedavg", "row"] = row


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_folder_is_refused_for_the_right_reason(what: str, made: Made, tmp_path: Path) -> None:
    folder = made.copy(tmp_path)
    change, reason = FORGED[what]
    change(folder)
    with_new_digests(folder)
    with pytest.raises(FedbenchError, match=reason):
        check_folder(folder, made.suite)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (rewritten("index.html", "</body>", "<p>the best</p></body>"), "index.html is not the file that was written"),
        (edited("results.csv.gz", raised("final/class_accuracy/bird", 0.5)), "results.csv.gz is not the file"),
        (in_manifest(files={}), "has no digest of results.csv.gz"),
        (in_manifest(suite={"name": "toy", "version": 3}), "manifest.json is of suite 'toy' version 3"),
        (lambda folder: (folder / MANIFEST).unlink(), "has no manifest.json"),
    ],
)
def test_what_the_board_does_not_show_is_held_by_digests(
    change: Change, reason: str, made: Made, tmp_path: Path
) -> None:
    folder = made.copy(tmp_path)
    change(folder)
    with pytest.raises(FedbenchError, match=reason):
        check_folder(folder, made.suite)


def test_drawing_takes_one_at_least_and_depends_on_the_seed_alone(made: Made) -> None:
    checked = check_folder(made.place / "out", made.suite)
    assert len(drawn(checked, 0.0, 0)) == 1
    assert len(drawn(checked, 0.3, 0)) == 2
    assert len(drawn(checked, 1.0, 0)) == 4
    assert drawn(checked, 0.3, 5) == drawn(replace(checked, specs=checked.specs[::-1]), 0.3, 5)
    assert len({drawn(checked, 0.1, seed)[0].run_id for seed in range(20)}) > 1


def verify(made: Made, folder: Path, *further: str) -> int:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FEDBENCH_CACHE", made.cache)
        return call("verify", str(folder), "--suite", made.suite, "--engine", "in-process", *further)


def test_verify_confirms_true_numbers_to_the_last_bit(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(made, made.place / "out", "--share", "0.5") == 0
    shown = capsys.readouterr().out
    assert shown.count("the same to the last bit") == 2 and "is confirmed by 2 runs" in shown


def rewritten_with(folder: Path, suite: str, change: Callable[[Frame], Frame]) -> None:
    """All files of ``folder`` anew, of changed results."""
    old = read_folder(folder)
    results, given = change(old.results.copy()), old.manifest.options
    commands = made_by(StoredResults(results, results.iloc[:0]), given)
    stored = StoredResults(results, results.iloc[:0].assign(failure=""))
    write(results, board_of_runs(load_suite(suite), given, stored), folder, commands)
    with_new_digests(folder)


@pytest.mark.parametrize(("headline", "worse"), [("macro_f1", True), ("global_accuracy", False)])
def test_whatever_ranks_a_table_is_compared_within_the_tolerance(headline: str, worse: bool) -> None:
    lines = [{"final/global_accuracy": 80.0, "final/macro_f1": value} for value in (90.0, 50.0)]
    assert bool(list(_differences(lines[0], lines[1], 0.5, {headline}))) is worse


def made_elsewhere(folder: Path) -> None:
    environment = read_folder(folder).manifest.environment.model_dump()
    in_manifest(environment=environment | {"torch": "1.0"})(folder)


def raising(metric: str, by: float) -> Callable[[Frame], Frame]:
    def change(results: Frame) -> Frame:
        results.loc[results["method"] == "fedprox", f"final/{metric}"] += by
        return results

    return change


def test_verify_finds_the_number_that_is_changed_wherever_it_stands(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made.copy(tmp_path)
    rewritten_with(folder, made.suite, raising("global_accuracy", 0.25))
    results = read_folder(folder).results
    assert call("submit", str(folder), "--suite", made.suite) == 0  # all of it agrees
    assert verify(made, folder, "--share", "1") == 1
    shown = " ".join(capsys.readouterr().out.split())
    forged = float(results[results["method"] == "fedprox"].iloc[0]["final/global_accuracy"])
    assert f"{PROX}, seed 0: global_accuracy is {forged!r} in the folder and {forged - 0.25!r} now" in shown
    assert "plain · clip:embedded, seed 0: the same to the last bit" in shown
    # elsewhere a quarter of a point is nothing
    made_elsewhere(folder)
    capsys.readouterr()
    assert verify(made, folder, "--share", "1") == 0
    shown = capsys.readouterr().out
    assert (
        "the same within 0.5 points (torch 1.0 then," in shown and "the same to the last bit (torch 1.0 then," in shown
    )


@pytest.mark.parametrize(("by", "code"), [(4.0, 0), (-6.0, 1)])
def test_what_a_board_is_ranked_by_is_compared_elsewhere_too(by: float, code: int, made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    stored = ("--suite", made.suite, "--store", made.store)
    assert call("leaderboard", *stored, "--metric", "worst_client", "--output", str(folder)) == 0
    rewritten_with(folder, made.suite, raising("worst_client_accuracy", by))
    made_elsewhere(folder)
    assert verify(made, folder, "--share", "1") == code


@pytest.mark.parametrize(
    ("change", "notes"),
    [
        (
            lambda results: results.query("method == 'fedavg' and seed == 1"),
            {f"1 row of the suite not run, such as {PROX}", "rows on clip:embedded are without seed 0 of the suite"},
        ),
        # a suite may grow by a row without its other runs again
        (
            lambda results: results.assign(suite_hash=["0" * 64, *results["suite_hash"][1:]]),
            {"1 run made with another text of the suite"},
        ),
    ],
)
def test_what_is_not_the_suites_is_told(
    change: Callable[[Frame], Frame], notes: set[str], made: Made, tmp_path: Path
) -> None:
    assert not [note for note in check_folder(made.place / "out", made.suite).notes if "suite" in note]
    folder = made.copy(tmp_path)
    rewritten_with(folder, made.suite, change)
    assert notes <= set(check_folder(folder, made.suite).notes)


def test_rows_that_train_more_of_a_backbone_may_have_fewer_seeds(made: Made) -> None:
    results, suite = read_folder(made.place / "out").results, load_suite(made.suite)
    fewer = results.query("method == 'fedavg' or seed == 0")
    lacks_one = "seed 1 is missing, which other rows of its backbone and tune have"
    with pytest.raises(FedbenchError, match=f"fedprox.*: {lacks_one}"):
        check_alike(fewer, suite)
    whole = fewer.assign(tune=fewer["method"].map({"fedavg": "auto", "fedprox": "full"}))
    check_alike(whole, suite)
    # among those that train as much, as before
    two = pd.concat([whole, results.assign(tune="full", row=lambda frame: frame["row"] + " whole")])
    with pytest.raises(FedbenchError, match=lacks_one):
        check_alike(two, suite)


SEEDS: dict[tuple[int, ...], dict[tuple[int, ...], str]] = {
    (0, 1): {(0, 1, 2, 3): "", (0, 1, 2): "", (0, 1): "", (0, 1, 3): "2", (0, 2, 3): "1", (0,): "1", (1, 3): "0, 2"},
    (2, 3): {(2, 3): "", (0, 2, 3): "", (1, 2, 3): "0", (0, 1): "2, 3"},
}
"""The suite's own seeds -> those of a row beside one of the seeds 0 to 3 -> those that are missing."""


@pytest.mark.parametrize("by_scale", [False, True])
@pytest.mark.parametrize(
    ("own", "there", "missing"), [(own, *case) for own, cases in SEEDS.items() for case in cases.items()]
)
def test_a_row_may_stop_after_the_suites_own_seeds_but_leaves_none_out(
    own: tuple[int, ...], there: tuple[int, ...], missing: str, by_scale: bool, made: Made
) -> None:
    results, changes = read_folder(made.place / "out").results, {"seeds": own}
    if by_scale:
        results, changes = results.assign(scale="small"), {"scales": {"small": Scale.model_construct(seeds=own)}}
    suite = load_suite(made.suite).model_copy(update=changes)
    more = pd.concat([results, *(results.query("seed == 1").assign(seed=seed) for seed in (2, 3))])
    given = more[(more["method"] != "fedprox") | more["seed"].isin(there)]
    refused = pytest.raises(FedbenchError, match=f"fedprox.*: seed {missing} is missing")
    with refused if missing else nullcontext():
        check_alike(given, suite)


def test_rows_with_fewer_seeds_are_noted(made: Made) -> None:
    results, suite = read_folder(made.place / "out").results, load_suite(made.suite)
    assert not any("fewer seeds" in note for note in _notes(results, suite))
    more = pd.concat([results, results.query("method == 'fedavg' and seed == 1").assign(seed=2)])
    assert f"1 row with fewer seeds than others of their backbone, such as {PROX} with 2 of 3" in list(
        _notes(more, suite)
    )


def test_the_note_on_missing_seeds_names_what_of_a_backbone_is_trained(made: Made) -> None:
    suite = load_suite(made.suite)
    specs = expand(suite, Overrides())
    full = specs[0].model_copy(update={"tune": "full", "seed": 1})
    notes = list(_beside_suite([*specs, full], suite, ()))
    assert "rows on clip:embedded, tune=full, are without seed 0 of the suite" in notes
    assert not any("rows on clip:embedded are" in note for note in notes)


def test_what_failed_before_it_finished_is_no_reason_to_refuse(made: Made) -> None:
    results = read_folder(made.place / "out").results
    failed = results.iloc[:1].assign(failure="out of memory", made_by='["fedbench run --method fedavg"]')
    given = read_folder(made.place / "out").manifest.options
    assert made_by(StoredResults(results, failed), given) == made_by(StoredResults(results, failed.iloc[:0]), given)
    assert "--method fedavg" in made_by(StoredResults(results.iloc[1:], failed), given)


DIVERGING = """
import torch

from fedbench.api import Method, NoParams, wrapper


class Brittle(Method[NoParams]):
    \"\"\"FedAvg whose weights are no number at seed 1.\"\"\"

    name = "brittle"
    citation = "nobody"
    Params = NoParams
    recipe = {}

    @wrapper
    def aggregate(self, task, rest):
        if task.spec.seed == 1 and task.round == 2:
            return {name: torch.full_like(value, torch.nan) for name, value in task.weights.items()}
        return rest(task)
"""


@dataclass(frozen=True)
class Brittle:
    """A folder of which one run has diverged."""

    place: Path
    cache: str

    @property
    def options(self) -> tuple[str, ...]:
        return ("--suite", str(self.place / "toy.yaml"), "--plugin", str(self.place / "brittle.py"))

    def verify(self, folder: Path) -> int:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("FEDBENCH_CACHE", self.cache)
            return call("verify", str(folder), *self.options, "--share", "1", "--engine", "in-process")


def _here(cache: str) -> tuple[str, ...]:
    return ("--engine", "in-process", "--cache-dir", cache)


@pytest.fixture(scope="module")
def brittle(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Brittle:
    one = Brittle(tmp_path_factory.mktemp("brittle"), made.cache)
    (one.place / "toy.yaml").write_text(SUITE.replace("fedprox", "brittle"), encoding="utf-8")
    (one.place / "brittle.py").write_text(DIVERGING, encoding="utf-8")
    stored = ("--store", str(one.place / "store"))
    assert call("run", *one.options, *stored, *_here(one.cache)) == 1
    assert call("leaderboard", *one.options, *stored, "--output", str(one.place / "out")) == 0
    return one


ELSE = "out of memory"


def failing(**values: Any) -> Callable[[Frame], None]:
    def change(frame: Frame) -> None:
        (at,) = [index for index, text in frame["failures"].items() if text not in ("", "[]")]
        (failure,) = json.loads(frame.loc[at, "failures"])
        frame.loc[at, "failures"] = json.dumps([failure | values])

    return change


def test_a_run_that_diverged_is_a_result_and_diverges_again(
    brittle: Brittle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("submit", str(brittle.place / "out"), *brittle.options) == 0
    assert "3 runs (1 further one diverged) of 2 rows" in capsys.readouterr().out
    assert brittle.verify(brittle.place / "out") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "brittle · clip:embedded, seed 1: diverged again" in shown and "is confirmed by 4 runs" in shown
    # it is among those drawn, whoever draws
    checked = check_folder(brittle.place / "out", brittle.options[1], (brittle.place / "brittle.py",))
    assert all(set(checked.diverged["run_id"]) <= {one.run_id for one in drawn(checked, 0.1, s)} for s in range(5))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"reason": ELSE}, f"brittle · clip:embedded: seed 1 failed: {ELSE}; run it again."),
        ({"code": "12345678"}, "seed 1 diverged with other code (12345678) than the row's"),
        ({"seed": 10**30}, "can't be read as a result folder"),
        ({"seed": 0}, "seed 0 has finished and failed"),
        ({"seed": 2}, "is not that of its recorded settings"),
        ({"run_id": "0" * 16}, "run_id 0000000000000000 is not that of its recorded settings"),
        ({"reason": "training diverged: so it was said."}, "failure is 1 of 2 seeds; seed 1 failed"),
    ],
)
def test_another_failure_is_refused(
    values: dict[str, Any], reason: str, brittle: Brittle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(brittle.place / "out", tmp_path / "out"))
    edited("leaderboard.csv.gz", failing(**values))(folder)
    with_new_digests(folder)
    assert call("submit", str(folder), *brittle.options) == 2
    assert reason in " ".join(capsys.readouterr().err.split())


def test_a_seed_that_only_is_said_to_have_diverged_is_found(
    brittle: Brittle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The method no longer diverges, as if its failure had been made up to be rid of a seed."""
    (tmp_path / "toy.yaml").write_text(SUITE.replace("fedprox", "brittle"), encoding="utf-8")
    (tmp_path / "brittle.py").write_text(DIVERGING.replace("seed == 1", "seed == 7"), encoding="utf-8")
    assert Brittle(tmp_path, brittle.cache).verify(brittle.place / "out") == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"seed 1 \(code .{8} then, .{8} now\): not repeated: now it ends with a number; in the", shown)
    # elsewhere rounding may have decided it
    elsewhere = Path(shutil.copytree(brittle.place / "out", tmp_path / "elsewhere"))
    made_elsewhere(elsewhere)
    assert Brittle(tmp_path, brittle.cache).verify(elsewhere) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "now): unsettled: now it ends with a number" in shown and "is confirmed by 3 runs, 1 unsettled" in shown


NAN, CRASH = "training diverged: nan.", "out of memory"


@pytest.mark.parametrize(
    ("recorded", "now", "elsewhere", "confirmed", "unsettled"),
    [
        (NAN, NAN, False, True, False),
        (NAN, "training diverged: inf.", True, True, False),
        (NAN, "", True, False, True),
        ("", NAN, True, False, True),
        (NAN, "", False, False, False),
        ("", NAN, False, False, False),
        ("", CRASH, True, False, False),
        (NAN, CRASH, True, False, False),
    ],
)
def test_two_ends_are_settled_on_one_platform_alone(
    recorded: str, now: str, elsewhere: bool, confirmed: bool, unsettled: bool
) -> None:
    found = _ended("row, seed 0", recorded, now, ("torch 1 then, 2 now",) * elsewhere, is_elsewhere=elsewhere)
    assert (found.is_confirmed, found.is_unsettled) == (confirmed, unsettled)


def test_an_empty_reason_in_results_is_no_divergence(made: Made, tmp_path: Path) -> None:
    folder = made.copy(tmp_path)
    rewritten_with(folder, made.suite, lambda results: raising("global_accuracy", 0.25)(results.assign(failure="")))
    assert call("submit", str(folder), "--suite", made.suite) == 0
    assert verify(made, folder, "--share", "1") == 1


def test_what_diverged_is_joined_too(brittle: Brittle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    into, whole = tmp_path / "all", str(brittle.place / "out")
    assert call("merge", whole, whole, "--into", str(into), *brittle.options) == 0
    assert call("submit", str(into), *brittle.options) == 0
    checked = check_folder(brittle.place / "out", brittle.options[1], (brittle.place / "brittle.py",))
    results = checked.folder.results
    number = pd.concat([results, results.iloc[:1].assign(run_id=checked.diverged["run_id"].iloc[0])])
    with pytest.raises(FedbenchError, match="seed 1: it diverged in one folder and ended with a number in another"):
        _diverged([checked], number)


def test_a_row_of_which_every_seed_diverged_is_refused(brittle: Brittle) -> None:
    read = read_folder(brittle.place / "out")
    row = next(line for line in read.board.to_dict("records") if line["failures"] not in ("", "[]"))
    with pytest.raises(FedbenchError, match="brittle.*: seed 1 diverged, as all of its row"):
        list(_of_row(row | {"runs": "{}"}, read.results))


def test_another_command_of_what_diverged_is_no_reason_to_refuse(brittle: Brittle, tmp_path: Path) -> None:
    """As where a seed was run by itself."""
    folder = Path(shutil.copytree(brittle.place / "out", tmp_path / "out"))
    page = folder / "leaderboard.md"
    page.write_text(
        page.read_text("utf-8").replace("$ fedbench lead", "$ fedbench run --seed 1\n$ fedbench lead"), "utf-8"
    )
    with_new_digests(folder)
    assert call("submit", str(folder), *brittle.options) == 0


def test_rows_beside_the_suite_are_told(made: Made, tmp_path: Path) -> None:
    suite = tmp_path / "toy.yaml"
    suite.write_text(SUITE, encoding="utf-8")
    stored = ("--suite", str(suite), "--store", str(tmp_path / "store"))
    place = ("--cache-dir", made.cache, "--engine", "in-process")
    assert call("run", *stored, *place, "--method", "fedavg", "--seed", "0", "--set", "lr=0.02") == 0
    assert call("leaderboard", *stored, "--output", str(tmp_path / "out")) == 0
    notes = check_folder(tmp_path / "out", str(suite)).notes
    assert "1 row not as in the suite, such as plain · clip:embedded" in notes


@pytest.fixture
def halves(made: Made, tmp_path: Path) -> list[str]:
    """The folder by seed."""
    folders = []
    for seed in (1, 0):
        folder = made.copy(tmp_path / str(seed))
        rewritten_with(folder, made.suite, lambda results, seed=seed: results.query("seed == @seed"))
        folders.append(str(folder))
    return folders


def test_folders_are_joined(made: Made, halves: list[str], tmp_path: Path) -> None:
    into = tmp_path / "all"
    whole = str(made.place / "out")
    assert call("merge", *halves, whole, "--into", str(into), "--suite", made.suite) == 0
    checked = check_folder(into, made.suite)
    pd.testing.assert_frame_equal(checked.folder.results, read_folder(made.place / "out").results, check_exact=True)
    assert checked.folder.manifest.environment == read_folder(made.place / "out").manifest.environment
    assert "fedprox" in (into / "index.html").read_text("utf-8")
    assert "$ fedbench leaderboard --suite toy\n" in (into / "leaderboard.md").read_text("utf-8")


def test_folders_that_clash_or_differ_are_not_joined(
    made: Made, halves: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    into = ("--into", str(tmp_path / "all"), "--suite", made.suite)
    whole = str(made.place / "out")
    assert call("merge", whole, made.store, *into) == 2
    assert "merge stores, or result folders" in capsys.readouterr().err
    assert call("merge", made.store, *into) == 2
    assert "--suite and --plugin are for result folders" in capsys.readouterr().err
    rewritten_with(Path(halves[0]), made.suite, lambda results: results.query("method == 'fedavg'"))
    assert call("merge", *halves, *into) == 2
    assert f"{PROX}: seed 1 is missing" in " ".join(capsys.readouterr().err.split())
    in_manifest(licence="MIT")(Path(halves[0]))
    assert call("merge", *halves, *into) == 2
    assert "the licence of" in capsys.readouterr().err
    rewritten_with(Path(halves[1]), made.suite, raising("global_accuracy", 1.0))
    assert call("merge", whole, halves[1], *into) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert f"{PROX}, seed 0: two folders have it with different numbers, global_accuracy" in shown
    assert not (tmp_path / "all" / "results.csv.gz").exists()


@pytest.fixture(scope="module")
def merged(made: Made) -> Iterator[tuple[str, str]]:
    into = str(made.place / "merged")
    (of_store,) = merge([made.store], into)
    assert (of_store.copied, of_store.skipped, of_store.unfinished) == (4, 0, 0)
    yield into, store_uri(into)


def test_merging_keeps_runs_curves_files_and_commands(made: Made, merged: tuple[str, str]) -> None:
    before, after = (store_uri(place) for place in (made.store, merged[0]))
    mine = {"mlflow_id", "parent"}
    results = [load_results(uri, "toy") for uri in (before, after)]
    one, other = (frame.drop(columns=list(mine)).sort_values("run_id", ignore_index=True) for frame in results)
    pd.testing.assert_frame_equal(one, other, check_exact=True, check_like=True)
    curves = [
        load_curves(uri, frame).drop(columns="mlflow_id") for uri, frame in zip((before, after), results, strict=True)
    ]
    curve, copied = (frame.sort_values(["run_id", "round"], ignore_index=True) for frame in curves)
    pd.testing.assert_frame_equal(curve, copied, check_exact=True)
    client = MlflowClient(after)
    for run_id in results[1]["mlflow_id"]:
        run = client.get_run(run_id)
        assert SEAL in run.data.tags and run.inputs.dataset_inputs
        names = {file.path for file in client.list_artifacts(run_id)}
        assert {"model", "federation.json", "predictions.csv"} <= names
        parent = client.get_run(run.data.tags["mlflow.parentRunId"])
        assert parent.data.tags["fedbench.kind"] == "invocation"
    assert results[1]["parent"].nunique() == 1


def test_merging_again_skips_what_is_there(made: Made, merged: tuple[str, str]) -> None:
    again = merge([made.store, merged[0]], merged[0])
    assert [(one.copied, one.skipped) for one in again] == [(0, 4), (0, 4)]


def test_a_clash_is_refused_before_anything_is_copied(made: Made, tmp_path: Path) -> None:
    other = Path(shutil.copytree(made.store, tmp_path / "other"))
    uri = store_uri(str(other))
    client = MlflowClient(uri)
    changed = load_results(uri, "toy").query("method == 'fedprox' and seed == 1").iloc[0]
    # who changes a run leaves no seal, or one of his own
    client.delete_tag(changed["mlflow_id"], SEAL)
    client.log_metric(changed["mlflow_id"], "final/global_accuracy", 99.0, step=100)
    with pytest.raises(FedbenchError, match="has no seal"):
        merge([made.store, str(other)], str(tmp_path / "new"))
    client.set_tag(changed["mlflow_id"], SEAL, seal_of(client.get_run(changed["mlflow_id"]).data))
    with pytest.raises(FedbenchError, match=r"fedprox .* seed 1 .* different numbers, global_accuracy [\d.]+ and 99.0"):
        merge([made.store, str(other)], str(tmp_path / "new"))
    assert MlflowClient(store_uri(str(tmp_path / "new"))).get_experiment_by_name("fedbench/toy") is None


def test_what_is_no_store_is_not_merged(tmp_path: Path) -> None:
    with pytest.raises(FedbenchError, match="there is no store at"):
        merge([str(tmp_path / "nowhere")], str(tmp_path / "new"))

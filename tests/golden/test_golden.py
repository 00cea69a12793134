"""Numbers of a small run of every shipped method, so that an unintended change of any of them is seen.

`pytest tests/golden --update-golden` rewrites them after an intended one; the difference then stands in the commit.
"""

import json
from pathlib import Path

import pytest

from fedbench.core.method.base import declares
from fedbench.kinds.registry import find_method, method_names
from fedbench.plugins.requirements import required_by
from fedbench.runs.job import run_spec
from fedbench.runs.prepare import Settings
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import parse_suite
from fedbench.testing import contract_backbone, with_learner

GOLDEN = Path(__file__).with_name("longtail.json")
SUITE = """
name: golden
dataset: "embedded?train=800&test=200"
scenario: {preset: longtail, imbalance_factor: 10, clients: 4, participation: 0.5, min_client_size: 4}
training: {rounds: 3, local_epochs: 2, lr: 0.02}
rows: [{method: fedavg}, {method: fedavg, set: {backbone: convnet}}]
"""


def measured(folder: Path, every: int) -> dict[str, dict[str, float]]:
    """The numbers by row, of ``every`` so many methods one."""
    suite = parse_suite(SUITE, "golden")
    settings = Settings(folder, folder / "cache")
    others = [name for name in method_names() if name not in ("fedavg", "example-median")]
    specs = expand(suite, Overrides())
    for name in map(with_learner, others[::every]):
        sets = [("backbone", contract_backbone(name))]
        if required_by(name.split("+")).keys() & {"server_data", "server_labels"}:
            sets += [("scenario.server_samples", 5), ("scenario.server_labels", "visible")]
        provided = {what for one in name.split("+") for what in declares(find_method(one), "provides")}
        sets += [("labels", "hidden")] if "labels" in provided else []
        specs += expand(suite, Overrides(methods=(name,), sets=tuple(sets)))
    rows = {}
    for spec in specs:
        summary = run_spec(spec, settings).summary
        keys = (
            "global_accuracy",
            "head_accuracy",
            "tail_accuracy",
            "personal_mean_client_accuracy",
            "train_loss",
            "bytes_up",
        )
        rows[spec.row] = {key: round(summary[key], 4) for key in keys if key in summary}
    return rows


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["a third of them", "all"])
def test_small_runs_give_the_recorded_numbers(tmp_path, request, every):
    updates = request.config.getoption("--update-golden")
    rows = measured(tmp_path, 1 if updates else every)
    if updates:
        GOLDEN.write_text(json.dumps(rows, indent=1) + "\n")
    expected = json.loads(GOLDEN.read_text())
    assert rows.keys() <= expected.keys()
    assert every > 1 or rows.keys() == expected.keys()
    for row in rows:
        numbers = expected[row]
        assert rows[row].keys() == numbers.keys()
        for key, value in numbers.items():
            # other processors round differently: one or two of 200 test images may change sides
            tolerance = {"bytes_up": 0.0, "train_loss": 0.01}.get(key, 3.0)
            assert rows[row][key] == pytest.approx(value, abs=tolerance), (row, key)

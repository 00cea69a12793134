"""Two recorded runs side by side: what differs is worked out by hand from hand-made events."""

import json
import sys
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from fedbench.cli.app import main
from fedbench.cli.commands.compare import shortened, sparkline, spread
from fedbench.core.errors import FedbenchError
from fedbench.core.records import RoundRecord, RunInfo, RunResult
from fedbench.core.spec import RunSpec, Training
from fedbench.tracking import tags as run_tags
from fedbench.tracking.recorded.comparison import (
    Comparison,
    compare,
    curves_beside,
    differences,
    metrics_beside,
    settings_of,
)
from fedbench.tracking.recorded.lookup import find_run, reading_client
from fedbench.tracking.schema import store_uri
from fedbench.tracking.tags import DEFAULTS, flat_params
from fedbench.tracking.writing.listener import Tracking

LEFT = RunSpec(method="fedavg", training=Training(rounds=3))
RIGHT = RunSpec(method="fedprox", params={"fedprox": {"mu": 0.5}}, seed=1, training=Training(rounds=4, eval_every=2))
UNFINISHED = RunSpec(seed=9)


def play(listener: Tracking, spec: RunSpec, curve: dict[int, float], final: dict[str, float], data: str) -> None:
    info = RunInfo({}, data, "w" * 64, 4, 2, 40, 8, 6, 24)
    listener.run_started(spec, info)
    for number, accuracy in curve.items():
        listener.round_finished(spec, RoundRecord(number, (0,), {"global_accuracy": accuracy}, 0, 0, 0.5))
    if final:
        listener.run_finished(spec, info, RunResult((), final, (), {}, 2.0))


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = store_uri(str(tmp_path_factory.mktemp("compared") / "store"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_tags, "versions", lambda: {"torch": "2.6", "numpy": "2.0"})
        patch.setattr(run_tags, "commit", lambda: "a" * 40)
        final = {"global_accuracy": 40.0, "tail_accuracy": 10.0, "class_accuracy/cat": 5.0, "bytes_up": 96.0}
        play(Tracking(place, "suite"), LEFT, {0: 10.0, 1: 20.0, 2: 30.0, 3: 40.0}, final, "d" * 64)
        patch.setattr(run_tags, "versions", lambda: {"torch": "2.7", "numpy": "2.0"})
        patch.setattr(run_tags, "commit", lambda: "b" * 40 + "+dirty")
        final = {"global_accuracy": 50.5, "head_accuracy": 70.0, "class_accuracy/cat": 6.0, "bytes_up": 48.0}
        play(Tracking(place, "suite"), RIGHT, {0: 10.0, 2: 45.0, 4: 80.0}, final, "e" * 64)
        listener = Tracking(place, "suite")
        play(listener, UNFINISHED, {}, {}, "d" * 64)
        listener._begun(listener._open[UNFINISHED.run_id])
    return place


@pytest.fixture(scope="module")
def compared(uri: str) -> Comparison:
    return compare(uri, LEFT.run_id, RIGHT.run_id[:8])


def lines(frame: pd.DataFrame) -> list[tuple[Any, ...]]:
    return list(frame.itertuples(index=False, name=None))


def test_settings_that_differ_come_by_dotted_key_and_equal_ones_are_counted(compared: Comparison) -> None:
    assert {key: (left, right) for key, left, right in lines(compared.spec)} == {
        "row": ("fedavg · clip:embedded", "fedprox · clip:embedded"),
        "method": ("fedavg", "fedprox"),
        "seed": ("0", "1"),
        "training.rounds": ("3", "4"),
        "training.eval_every": ("1", "2"),
        "fedprox.mu": ("", "0.5"),
    }
    # all settings of the left run and what its suite calls it, but for the five that differ there
    told_by_the_suite = 4
    assert compared.equal_settings == len({**DEFAULTS, **flat_params(LEFT)}) + told_by_the_suite - 5


def test_a_setting_that_is_younger_than_a_run_is_its_default(uri: str) -> None:
    run = find_run(reading_client(uri), LEFT.run_id)
    before = settings_of(run)
    del run.data.params["head_scale"], run.data.params["training.augment"]
    assert settings_of(run) == before and before["training.augment"] == "none"
    assert differences(settings_of(run), before)[0].empty


def test_provenance_that_differs_is_shown(compared: Comparison) -> None:
    assert lines(compared.provenance) == [
        ("commit", "a" * 40, "b" * 40 + "+dirty"),
        ("data_hash", "d" * 64, "e" * 64),
        ("version.torch", "2.6", "2.7"),
    ]
    # harness_hash, weights_hash, version.numpy; the code of fedprox is of one run only
    assert compared.equal_provenance == 3


def test_metrics_differ_right_minus_left_with_accuracies_first_and_classes_last(compared: Comparison) -> None:
    frame = compared.metrics
    names = [
        "global_accuracy",
        "head_accuracy",
        "tail_accuracy",
        "bytes_up",
        "seconds",
        "class_accuracy/cat",
    ]
    assert frame["metric"].tolist() == names
    assert frame["left"].fillna(-1).tolist() == [40.0, -1, 10.0, 96.0, 2.0, 5.0]
    assert frame["right"].fillna(-1).tolist() == [50.5, 70.0, -1, 48.0, 2.0, 6.0]
    assert frame["difference"].fillna(-1).tolist() == [10.5, -1, -1, -48.0, 0.0, 1.0]


def test_curves_have_the_rounds_that_both_evaluated(compared: Comparison) -> None:
    assert lines(compared.curves) == [(0, 10.0, 10.0), (2, 30.0, 45.0)]


def test_a_run_compared_with_itself_differs_in_nothing(uri: str) -> None:
    same = compare(uri, LEFT.run_id, LEFT.run_id)
    assert same.spec.empty and same.provenance.empty
    assert (same.metrics["difference"] == 0).all()


def test_nothing_beside_nothing_is_empty() -> None:
    assert differences({}, {})[1] == 0
    assert metrics_beside({}, {}).empty
    assert curves_beside({0: 1.0}, {1: 1.0}).empty


def test_an_unknown_run_is_refused(uri: str) -> None:
    with pytest.raises(FedbenchError, match="no run's id begins with 'ffffffff'"):
        compare(uri, LEFT.run_id, "ffffffff")


@pytest.fixture
def fedbench(uri: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `fedbench compare` writes."""

    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["fedbench", "compare", *arguments, "--store", uri])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capsys.readouterr().out

    return call


def test_compare_shows_everything_within_100_columns(fedbench: Callable[..., str]) -> None:
    shown = fedbench(LEFT.run_id, RIGHT.run_id)
    for line in (
        "settings: 6 of",
        "provenance: 3 of 6 differ",
        "final metrics (--classes shows the accuracy of every class)",
        "global accuracy by round, 10.0 to 45.0 %",
        "left   ▁▅",
        "right  ▁█",
    ):
        assert line in shown
    cells = [line.split() for line in shown.splitlines()]
    assert ["fedprox.mu", "–", "0.5"] in cells
    assert ["commit", "a" * 12, "b" * 12 + "+dirty"] in cells
    assert ["global_accuracy", "40.00", "50.50", "+10.50"] in cells
    assert ["head_accuracy", "–", "70.00", "–"] in cells
    assert ["round", "0", "2"] in cells and ["left", "10.0", "30.0"] in cells
    assert "class_accuracy/cat" not in shown
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 100
    assert "class_accuracy/cat" in fedbench(LEFT.run_id, RIGHT.run_id, "--classes")


def test_a_run_that_did_not_finish_is_compared_by_what_it_has(fedbench: Callable[..., str]) -> None:
    shown = fedbench(UNFINISHED.run_id, UNFINISHED.run_id)
    assert shown.splitlines()[0].endswith(", RUNNING")
    assert "settings: all " in shown and "provenance: all 6 are equal" in shown
    assert "final metrics: neither run finished" in shown
    assert "no round that both runs evaluated" in shown


def test_compare_as_json_has_null_for_what_a_run_lacks(fedbench: Callable[..., str]) -> None:
    read = json.loads(fedbench(LEFT.run_id, RIGHT.run_id, "--format", "json"))
    assert read["equal_provenance"] == 3
    by_name = {line["metric"]: line for line in read["metrics"]}
    assert by_name["head_accuracy"]["left"] is None
    assert by_name["global_accuracy"]["difference"] == 10.5
    assert read["curves"] == [{"round": 0, "left": 10.0, "right": 10.0}, {"round": 2, "left": 30.0, "right": 45.0}]


def test_long_curves_are_thinned_evenly_with_both_ends() -> None:
    assert spread(3, 10) == [0, 1, 2]
    # steps of 100 / 9
    assert spread(101, 10) == [0, 11, 22, 33, 44, 56, 67, 78, 89, 100]
    assert len(set(spread(11, 10))) == 10


def test_sparklines_share_a_scale() -> None:
    assert sparkline([0, 50, 100], 0, 100) == "▁▅█"
    assert sparkline([5, 5], 5, 5) == "▁▁"


def test_hashes_are_shortened_and_other_text_is_not() -> None:
    assert shortened("0123456789abcdef" * 4) == "0123456789ab"
    assert shortened("f" * 40 + "+dirty") == "f" * 12 + "+dirty"
    assert shortened("clip:embedded") == "clip:embedded"
    assert shortened("") == "–"

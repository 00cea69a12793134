"""Own models by round: beside the global models' accuracy over the same clients, in curves, figures and on the page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedbench.core.errors import FedbenchError
from fedbench.core.records import RoundRecord, RunInfo, RunResult
from fedbench.core.spec import RunSpec, Training
from fedbench.tracking.listener import Tracking
from fedbench.tracking.schema import store_uri
from fedbench.workflow.results import load
from fedbench_boards.leaderboard.board import leaderboard
from fedbench_boards.leaderboard.figures import _of_rounds
from fedbench_boards.leaderboard.page.data import page_of
from fedbench_boards.leaderboard.results import GROUPS, load_curves, load_results
from fedbench_boards.leaderboard.rows import is_tracked
from tests.leaderboard.frames import read_of

OWN, SHARED, OVERALL = "personal_mean_client_accuracy", "mean_client_accuracy", "global_accuracy"
CHOSEN = "selected_unseen_domain_accuracy"
TAIL, OWN_TAIL = "tail_client_accuracy", "personal_tail_client_accuracy"
# by method: of every round, its metrics. fedpcl has no global model
ROUNDS: dict[str, list[dict[str, float]]] = {
    "fedavg": [{OVERALL: 10.0, SHARED: 20.0 + n, TAIL: 5.0 + n} for n in range(3)],
    "fedbn": [
        {OVERALL: 10.0, SHARED: 1.0},
        {OVERALL: 11.0, SHARED: 2.0, OWN: 60.0, OWN_TAIL: 40.0},
        {OVERALL: 12.0, SHARED: 3.0, OWN: 70.0, OWN_TAIL: 50.0},
    ],
    "fedpcl": [{}, {OWN: 80.0}, {OWN: 90.0}],
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each method, of own models by round."""
    folder = tmp_path_factory.mktemp("own")
    listener = Tracking(store_uri(str(folder)), "personal")
    for method, rounds in ROUNDS.items():
        one = RunSpec(method=method, training=Training(rounds=2, own_every=1))
        info = RunInfo({}, "d" * 64, "", 1, 1, 7, 8, 6, 24, classnames=("cat",), class_counts=((7,),))
        listener.run_started(one, info)
        for number, metrics in enumerate(rounds):
            listener.round_finished(one, RoundRecord(number, (), {"train_loss": 1.0, **metrics}, 100, 50, 0.1))
        summary = {**rounds[-1], "bytes_up": 300.0, "bytes_down": 150.0}
        listener.run_finished(one, info, RunResult((), summary, (0, 1), {"w": np.zeros(2)}, 1.0))
    return folder


def by_method(curves: pd.DataFrame, results: pd.DataFrame, metric: str) -> dict[str, dict[int, float]]:
    """Its values by round of every method."""
    method = curves["mlflow_id"].map(dict(zip(results["mlflow_id"], results["method"], strict=True)))
    known = curves.assign(method=method).dropna(subset=[metric])
    return {str(name): dict(zip(own["round"], own[metric], strict=True)) for name, own in known.groupby("method")}


def test_curves_of_own_models_have_the_global_ones_over_the_same_clients_beside_them(store: Path) -> None:
    results = load_results(store_uri(str(store)), "personal")
    curves = load_curves(store_uri(str(store)), results, OWN, OWN_TAIL)
    assert by_method(curves, results, OWN) == {
        "fedavg": {0: 20.0, 1: 21.0, 2: 22.0},
        "fedbn": {1: 60.0, 2: 70.0},
        "fedpcl": {1: 80.0, 2: 90.0},
    }
    assert by_method(curves, results, OWN_TAIL) == {
        "fedavg": {0: 5.0, 1: 6.0, 2: 7.0},
        "fedbn": {1: 40.0, 2: 50.0},
    }
    assert by_method(curves, results, OVERALL).keys() == {"fedavg", "fedbn"} and SHARED not in curves
    # ranked by what all have, own models have no say
    plain = load_curves(store_uri(str(store)), results, OVERALL)
    assert by_method(plain, results, OVERALL).keys() == {"fedavg", "fedbn"} and len(plain) == 6


def test_rounds_are_counted_to_what_own_models_reach_and_the_page_draws_them(store: Path) -> None:
    results = load_results(store_uri(str(store)), "personal")
    curves = load_curves(store_uri(str(store)), results, OWN)
    board = leaderboard(results, headline=OWN, curves=curves, target=65)
    rows = {line.label: line.milestone for line in board.tables[0].lines}
    assert {name: one.rounds.mean for name, one in rows.items() if one.reached} == {"fedbn": 2.0, "fedpcl": 1.0}
    assert rows["fedavg"].text == "0/1"
    # by a metric that fedpcl has in no round it has no curve, though it has one of own models
    general = leaderboard(results, headline=OVERALL, curves=curves, target=11).tables[0]
    assert [line.milestone.text for line in general.lines if line.label == "fedpcl"] == [""]
    page = page_of(read_of(results, board, curves), {}, "")
    drawn = str(page.sections[0].charts[0])
    assert "own models after every evaluated round" in drawn and drawn.count("<polyline") + drawn.count("<path") >= 3


def test_figures_draw_own_models_by_round_and_by_group(store: Path) -> None:
    found = load(store, "personal")
    for metric in (OWN, "personal_mean_client"):
        (axes, by_tail) = found.plot("rounds", metric=metric).axes
        lines = {str(line.get_label()): list(map(float, line.get_ydata())) for line in axes.get_lines()}
        assert lines == {"fedavg": [20.0, 21.0, 22.0], "fedbn": [60.0, 70.0], "fedpcl": [80.0, 90.0]}
        assert (axes.get_title(), by_tail.get_title()) == ("own models", "own models, tail")
    by_round = found.rounds()
    assert by_round.loc[by_round["method"] == "fedbn", OWN].dropna().tolist() == [60.0, 70.0]
    ranked = found.table(metric="personal_tail_client")
    assert [row.split()[0] for row in ranked["row"]][:2] == ["fedbn", "fedavg"]


def test_by_round_stands_accuracy_where_what_is_ranked_is_of_one_round(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = load_results(store_uri(str(store)), "personal")
    for headline, groups, titles in [
        (CHOSEN, (), ["accuracy"]),
        (OWN, (), ["own models"]),
        (OWN, GROUPS, ["own models", "own models, tail"]),
    ]:
        drawn = _of_rounds(store_uri(str(store)), results, None, headline, groups)
        assert [axes.get_title() for axes in drawn.axes] == titles
    with pytest.raises(FedbenchError, match="no curve of any of the metrics"):
        _of_rounds(store_uri(str(store)), results.assign(**{f"final/{CHOSEN}": 1.0}), CHOSEN, OWN, ())
    curves = load_curves(store_uri(str(store)), results, OWN, OWN_TAIL)
    of_the_last = curves.assign(**{OWN: curves[OWN].where(curves["round"] == 2)})
    monkeypatch.setattr("fedbench_boards.leaderboard.figures.load_curves", lambda *_: of_the_last)
    drawn = _of_rounds(store_uri(str(store)), results, None, OWN, GROUPS)
    assert [axes.get_title() for axes in drawn.axes] == ["accuracy"]


def test_a_metric_of_own_models_is_tracked_though_round_0_has_none() -> None:
    curves = pd.DataFrame({"mlflow_id": ["a", "a", "b", "b"], "round": [0, 1, 0, 1], OWN: [np.nan, 2.0, 1.0, 3.0]})
    assert is_tracked(curves, ["a", "b"], OWN)
    # after the last round alone
    last = pd.DataFrame({"mlflow_id": "a", "round": [0, 1, 2], OWN: [np.nan, np.nan, 3.0]})
    assert not is_tracked(last, ["a"], OWN)

"""Figures: the points they are drawn from by hand, what is drawn, and files that are the same every time."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from fedbench.cli.app import app
from fedbench.core.errors import FedbenchError
from fedbench.core.records import RunInfo, RunResult
from fedbench.rounds.loop import predict, start
from fedbench.runs.prepare import Settings
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import parse_suite
from fedbench.testing import tiny_run, tiny_spec
from fedbench.tracking.listener import Tracking
from fedbench.tracking.schema import store_uri
from fedbench.workflow.results import load
from fedbench_boards.leaderboard import drawing, figures
from fedbench_boards.leaderboard.drawing import Point, by_row, rows_of, swept
from fedbench_boards.leaderboard.figures import owners_of
from tests.leaderboard.published_counts import results_of

SUITE = """
name: mine
scenario: {preset: longtail, imbalance_factor: 100}
backbone: clip:embedded
seeds: [0, 1]
rows:
  - method: fedavg
  - {method: fedprox, set: {fedprox.mu: [0.01, 0.1, 1.0], lr: [0.1, 0.2]}}
"""
ACCURACY = "final/global_accuracy"
MINE = parse_suite(SUITE, "mine.yaml")


@pytest.fixture
def results():
    specs = expand(parse_suite(SUITE, "mine.yaml"), Overrides())
    frame = results_of(specs)
    # 50 and ten times mu, one more for the second seed; the learning rate adds its own value
    frame[ACCURACY] = [50 + 10 * s.params.get("fedprox", {}).get("mu", 0) + s.seed + s.training.lr for s in specs]
    frame["final/head_accuracy"], frame["final/tail_accuracy"] = 80.0, 30.0
    return frame


def test_points_are_means_over_seeds_at_the_values_of_a_setting(results):
    series = swept(results[results["method"] == "fedprox"], ["fedprox.mu", "lr"], "global_accuracy")
    ((name, points),) = series.items()
    assert name == "fedprox" and [point.at for point in points][:3] == [(0.01, 0.1), (0.01, 0.2), (0.1, 0.1)]
    # (50 + 0.1 + 0.1) and one more for the other seed
    assert points[0].mean == pytest.approx(50.7) and points[0].std == pytest.approx(math.sqrt(0.5))
    assert points[0].seeds == 2
    with pytest.raises(FedbenchError, match="several values of rounds; .*--set rounds=VALUE,VALUE"):
        swept(results, ["rounds"], "global_accuracy")
    with pytest.raises(FedbenchError, match=r"unknown setting of these runs 'fedprox.nu'.*'fedprox.mu'"):
        swept(results, ["fedprox.nu"], "global_accuracy")


def test_lines_of_one_method_that_differ_in_more_than_the_swept_setting_are_lines_of_their_own(results):
    two = pd.concat([results, results.assign(backbone="resnet8", **{ACCURACY: 90.0})])
    series = swept(two[two["row"].str.contains("lr=0.1")], ["fedprox.mu"], "global_accuracy")
    assert list(series) == ["fedprox [backbone=clip:embedded]", "fedprox [backbone=resnet8]"]
    assert [[point.at for point in points] for points in series.values()] == [[(0.01,), (0.1,), (1.0,)]] * 2
    rates = swept(results, ["fedprox.mu"], "global_accuracy")
    assert list(rates) == ["fedprox [lr=0.1]", "fedprox [lr=0.2]"]


def test_rows_of_another_budget_or_other_data_stand_apart_by_name(results):
    fedavg = results[results["method"] == "fedavg"]
    name = str(fedavg["row"].iloc[0])
    short = fedavg.assign(rounds="2", mlflow_id=fedavg["mlflow_id"] + "b", **{ACCURACY: 10.0})
    # those of one command interleave
    both = pd.concat([results, short]).sort_values("seed", kind="stable")
    rows = rows_of(both)
    apart = [f"{name} [rounds={rounds}]" for rounds in (results["rounds"].iloc[0], "2")]
    assert sorted(own for own in rows if own.startswith("fedavg")) == sorted(apart)
    assert list(rows[apart[1]]["mlflow_id"]) == list(short["mlflow_id"])
    assert len(rows) == len(rows_of(results)) + 1
    # of runs of one seed, and of versions of the code, the newest
    again = fedavg.assign(mlflow_id=fedavg["mlflow_id"] + "c", started=fedavg["started"] + pd.Timedelta(1, "h"))
    assert list(rows_of(pd.concat([again, results]))["fedavg"]["mlflow_id"]) == list(again["mlflow_id"])


def test_a_sweep_ranked_by_own_models_has_rows_with_one_model(results):
    own = MINE.model_copy(update={"headline": "personal_mean_client_accuracy"})
    one_model = results.drop(columns=[name for name in results if "personal" in name])
    made = figures.drawn(
        "sweep", "", own, one_model, Settings(Path(), Path()), by=("fedprox.mu",), methods=("fedprox",)
    )
    assert len(made.axes[0].containers) == 2
    with pytest.raises(FedbenchError, match="unknown accuracy in these results 'few_shot_accuracy'"):
        few = MINE.model_copy(update={"headline": "few_shot_accuracy"})
        figures.drawn("sweep", "", few, results, Settings(Path(), Path()), by=("fedprox.mu",))
    with pytest.raises(FedbenchError, match="no run has an accuracy of head and tail"):
        figures.drawn(
            "gap", "", MINE, results.drop(columns="final/tail_accuracy"), Settings(Path(), Path()), by=("lr",)
        )


def test_a_line_has_the_points_and_a_log_scale_where_values_span_decades(results):
    fixed = results[results["row"].str.contains("lr=0.1|fedavg")]
    series = swept(fixed, ["fedprox.mu"], "global_accuracy")
    (axes,) = drawing.lines(series, "fedprox.mu", "global_accuracy").axes
    line = axes.containers[0].lines[0]
    x, y = line.get_data()
    assert list(x) == [0.01, 0.1, 1.0] and y[0] == pytest.approx(50.7) and axes.get_xscale() == "log"


def test_a_grid_has_a_number_in_every_cell(results):
    series = swept(results[results["method"] == "fedprox"], ["fedprox.mu", "lr"], "global_accuracy")
    made = drawing.grid(series["fedprox"], ["fedprox.mu", "lr"], "global_accuracy", "fedprox")
    assert [text.get_text() for text in made.axes[0].texts] == ["50.7", "51.6", "60.6", "50.8", "51.7", "60.7"]


def test_gains_are_to_the_baseline_and_refused_without_one(results):
    rows = by_row(results, ["global_accuracy", "tail_accuracy"])
    made = drawing.gains(rows, "fedavg", ["global_accuracy", "tail_accuracy"])
    widths = [round(bar.get_width(), 1) for bar in made.axes[0].patches]
    # fedavg has the default rate of 0.01
    assert widths[:3] == [0.2, 0.3, 1.1] and set(widths[6:]) == {0.0}
    # what is not measured is no bar, and not level with the baseline
    one, two = pd.Series({0: 1.0}), pd.Series({0: 3.0})
    lacking = drawing.gains({"a": {"x": one}, "b": {"x": two, "y": one}}, "b", ["x", "y"])
    assert np.array_equal([bar.get_width() for bar in lacking.axes[0].patches], [-2.0, np.nan], equal_nan=True)
    # over the seeds that both have: 5 - 3, though the means are 5 and 6
    fewer = drawing.gains({"a": {"x": pd.Series({1: 5.0})}, "b": {"x": pd.Series({0: 9.0, 1: 3.0})}}, "b", ["x"])
    assert [bar.get_width() for bar in fewer.axes[0].patches] == [2.0]
    with pytest.raises(FedbenchError, match=r"there is no row 'fedavgm'.*--baseline is one of fedavg, "):
        drawing.gains(rows, "fedavgm", ["global_accuracy"])


def test_rows_of_one_label_stand_apart(results):
    own = results[results["method"] == "fedavg"]
    row = own["row"].iloc[0]
    both = pd.concat([own, own.assign(row=f"{row} (tuned)", **{ACCURACY: 90.0})])
    rows = by_row(both, ["global_accuracy"])
    assert list(rows) == [row, f"{row} (tuned)"] and set(rows[f"{row} (tuned)"]["global_accuracy"]) == {90.0}
    # a seed without the metric is left out, not the metric
    lacking = own.assign(**{ACCURACY: [math.nan, *own[ACCURACY][1:]]})
    assert list(by_row(lacking, ["global_accuracy"])["fedavg"]["global_accuracy"].index) == list(own["seed"][1:])


def test_rounds_are_a_panel_a_group_and_a_line_a_row(results):
    curves = pd.DataFrame(
        {"mlflow_id": ["0", "0", "1", "1"], "round": [1, 2, 1, 2], "global_accuracy": [10.0, 20.0, 30.0, 40.0]}
    )
    made = drawing.rounds(curves, {"0": "fedavg", "1": "fedavg"}, ["global_accuracy", "tail_accuracy"])
    (axes,) = made.axes
    assert list(axes.get_lines()[0].get_ydata()) == [20.0, 30.0]
    with pytest.raises(FedbenchError, match="no curve of any of the metrics"):
        drawing.rounds(curves, {}, ["tail_accuracy"])


def test_rows_of_one_method_on_two_backbones_are_two_lines(results):
    rows = ["fedavg · resnet8", "fedavg · clip:embedded", "fedbn · resnet8", "fedavg · resnet8"]
    runs = pd.concat([results.iloc[:1]] * 4).assign(mlflow_id=list("abcd"), row=rows, seed=range(4))
    assert owners_of(runs) == {
        "a": "fedavg · resnet8",
        "b": "fedavg · clip:embedded",
        "c": "fedbn",
        "d": "fedavg · resnet8",
    }


@pytest.mark.parametrize("suffix", drawing.SUFFIXES)
def test_files_are_the_same_every_time(suffix, results, tmp_path):
    series = swept(results[results["row"].str.contains("lr=0.1")], ["fedprox.mu"], "global_accuracy")
    for name in ("one", "two"):
        drawing.save(drawing.lines(series, "fedprox.mu", "global_accuracy"), tmp_path / (name + suffix))
    assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()
    with pytest.raises(FedbenchError, match="is none of .png, .svg, .pdf"):
        drawing.save(drawing.lines(series, "fedprox.mu", "global_accuracy"), tmp_path / "one.jpg")


def test_a_point_of_fewer_seeds_says_of_how_many():
    points = [Point((1.0,), 50.0, 1.0, 3), Point((2.0,), 60.0, math.nan, 1)]
    (axes,) = drawing.lines({"fedprox": points}, "fedprox.mu", "global_accuracy").axes
    assert [(text.get_text(), text.xy) for text in axes.texts] == [("1 of 3 seeds", (2.0, 60.0))]


def test_the_command_draws_recorded_runs_and_says_what_is_missing(tmp_path):
    (tmp_path / "mine.yaml").write_text(SUITE)
    uri = store_uri(str(tmp_path / "store"))
    listener, info = Tracking(uri, "mine"), RunInfo({}, "d" * 64, "", 20, 8, 400, 80, 6, 24)
    for spec in expand(parse_suite(SUITE, "mine.yaml"), Overrides(seeds=(0,))):
        listener.run_started(spec, info)
        summary = {"global_accuracy": 20.0, "head_accuracy": 40.0, "tail_accuracy": 10.0}
        listener.run_finished(spec, info, RunResult((), summary, (0,), {}, 1.0))

    def ask(*words):
        common = ["--suite", str(tmp_path / "mine.yaml"), "--store", str(tmp_path / "store")]
        return CliRunner().invoke(app, ["figure", *words, *common, "-o", str(tmp_path / "made.png")])

    for words in (
        ("sweep", "--by", "fedprox.mu", "--by", "lr", "--method", "fedprox"),
        ("gap", "--by", "fedprox.mu"),
        ("gains",),
    ):
        found = ask(*words)
        assert found.exit_code == 0 and (tmp_path / "made.png").stat().st_size > 5000, found.stderr
        (tmp_path / "made.png").unlink()
    for words, message in (
        (("sweep",), "needs --by KEY"),
        (("sweep", "--by", "fedprox.mu", "--method", "moon"), "unknown method of these runs 'moon'"),
        (("sweep", "--by", "fedprox.mu", "--setting", "x"), "unknown setting of these runs 'x'"),
        (("rounds",), "no curve of any of the metrics"),
    ):
        found = ask(*words)
        assert found.exit_code == 2 and message in found.stderr, found.stderr


def test_layers_are_means_over_runs_in_the_order_of_their_numbers():
    one = pd.DataFrame({"cka_global/01_conv": [0.9, 0.7], "cka_global/02_logits": [0.5, 0.1]})
    (axes,) = drawing.layers({"fedavg": one, "fedglcl": one + 0.1}, "cka_global/").axes
    assert [list(line.get_ydata()) for line in axes.lines] == [pytest.approx([0.8, 0.3]), pytest.approx([0.9, 0.4])]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["01_conv", "02_logits"]
    assert axes.get_ylabel() == "CKA with the global model"


def test_clients_stand_by_their_clusters_and_dots_by_their_samples():
    made = drawing.holdings([[4, 0], [1, 1], [0, 16]], ("cat", "dog"), {"prompt": np.array([1, 0, 1])})
    (axes,) = made.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "0", "2"]
    sizes = [list(dots.get_sizes()) for dots in axes.collections]
    # of client 1, 0 and 2: the root of the share of the most, 16
    assert sizes == [[15.0, 15.0], [30.0, 0.0], [0.0, 60.0]]
    assert len(axes.lines) == 1 and axes.lines[0].get_xdata()[0] == 0.5
    (plain,) = drawing.holdings([[4, 0], [1, 1]], ("cat", "dog"), {}).axes
    assert [tick.get_text() for tick in plain.get_xticklabels()] == ["0", "1"] and not plain.lines


def test_entropies_have_their_bound():
    (axes,) = drawing.entropies({"clip-zs": np.array([0.0, 1.0, 2.0])}, 4).axes
    assert axes.get_title() == "clip-zs: mean 1.00"
    assert [list(line.get_ydata()) for line in axes.lines] == [[0.0, 1.0, 2.0], [2.0, 2.0]]


def test_entropies_of_a_model_are_those_of_its_softmax_in_bits():
    run = tiny_run(tiny_spec("clip-zs"))
    state = run.initial_state()
    scores = predict(run, state, run.test).scores.double()
    shares = scores.softmax(1)
    torch.testing.assert_close(
        torch.from_numpy(figures.entropies(run, state)), -(shares * shares.log2()).nansum(1), rtol=1e-6, atol=1e-9
    )


def test_the_plane_has_a_point_a_sample_and_is_the_same_every_time():
    run = tiny_run(tiny_spec("fedavg"))
    plane, labels = figures.embedded(run, run.initial_state())
    again, _ = figures.embedded(run, run.initial_state())
    assert plane.shape == (len(run.test), 2) and labels.tolist() == run.scored.test.labels.tolist()
    assert (plane == again).all()


def test_clusters_are_those_that_a_method_forms_before_round_1():
    run = tiny_run(tiny_spec("capt-reconstructed"))
    state = run.initial_state()
    start(run, state)
    found = figures.clusters(run)
    assert found.keys() == {"prompt.general", "prompt.class"}
    assert found["prompt.class"].tolist() == state.server["capt-reconstructed"]["prompt.class.clusters"].tolist()
    assert figures.clusters(tiny_run(tiny_spec("fedavg"))) == {}


def test_a_measure_of_some_classes_is_titled_by_both():
    names = ["drift", "drift/head", "tail_accuracy", "domain_accuracy/photo"]
    curves = pd.DataFrame({"mlflow_id": "a", "round": [1, 2], **{name: [1.0, 2.0] for name in names}})
    panels = drawing.rounds(curves, {"a": "fedavg"}, names).axes
    assert [axes.get_title() for axes in panels] == ["drift", "drift, head", "tail", "photo"]


def test_figures_of_measures_and_models_are_drawn_from_a_store(tmp_path):
    suite = tmp_path / "mine.yaml"
    rows = ("{method: cka+drift, label: fedavg, set: {lr: 0.1}}", "{method: clip-zs, label: zero-shot}")
    training = "training: {rounds: 2, batch_size: 32, eval_every: 2}"
    scenario = "scenario: {preset: iid, clients: 2}"
    text = [
        f"name: mine\n{scenario}\nbackbone: clip:embedded\ndataset: embedded?train=200\n{training}\nseeds: [0]\nrows:"
    ]
    suite.write_text("\n".join([*text, *(f"  - {row}" for row in rows)]) + "\n")
    given = ["--suite", str(suite), "--store", str(tmp_path / "store")]
    runner, places = CliRunner(), {"FEDBENCH_DATA": str(tmp_path)}
    ran = runner.invoke(app, ["run", *given, "--engine", "in-process"], env=places)
    assert ran.exit_code == 0, ran.output
    for kind, *more in (
        ("layers", "--method", "cka+drift"),
        ("rounds", "--metric", "drift"),
        ("entropies",),
        ("embedding", "--method", "cka+drift"),
        ("holdings", "--method", "cka+drift"),
    ):
        file = tmp_path / f"{kind}.png"
        drawn = runner.invoke(app, ["figure", kind, *given, "-o", str(file), *more], env=places)
        assert drawn.exit_code == 0, (kind, drawn.output)
        assert file.read_bytes()[:4] == b"\x89PNG"
    # of all suites of a store as well
    assert load(tmp_path / "store").plot("layers", methods="cka+drift").axes
    refused = runner.invoke(app, ["figure", "layers", *given, "-o", str(tmp_path / "x.png"), "--metric", "cka_nobody"])
    assert refused.exit_code == 2 and "have measured no cka_nobody" in refused.output

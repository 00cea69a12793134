"""Figures: the points they are drawn from by hand, what is drawn, and files that are the same every time."""

import math

import pandas as pd
import pytest
from typer.testing import CliRunner

from fedbench.cli.app import app
from fedbench.core.errors import FedbenchError
from fedbench.core.records import RunInfo, RunResult
from fedbench.leaderboard.figures import draw
from fedbench.leaderboard.figures.points import by_row, swept
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import parse_suite
from fedbench.tracking.schema import store_uri
from fedbench.tracking.writing.listener import Tracking
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


def test_a_line_has_the_points_and_a_log_scale_where_values_span_decades(results):
    fixed = results[results["row"].str.contains("lr=0.1|fedavg")]
    series = swept(fixed, ["fedprox.mu"], "global_accuracy")
    (axes,) = draw.lines(series, "fedprox.mu", "global_accuracy").axes
    line = axes.containers[0].lines[0]
    x, y = line.get_data()
    assert list(x) == [0.01, 0.1, 1.0] and y[0] == pytest.approx(50.7) and axes.get_xscale() == "log"


def test_a_grid_has_a_number_in_every_cell(results):
    series = swept(results[results["method"] == "fedprox"], ["fedprox.mu", "lr"], "global_accuracy")
    made = draw.grid(series["fedprox"], ["fedprox.mu", "lr"], "global_accuracy", "fedprox")
    assert [text.get_text() for text in made.axes[0].texts] == ["50.7", "51.6", "60.6", "50.8", "51.7", "60.7"]


def test_gains_are_to_the_baseline_and_refused_without_one(results):
    rows = by_row(results, ["global_accuracy", "tail_accuracy"])
    made = draw.gains(rows, "fedavg", ["global_accuracy", "tail_accuracy"])
    widths = [round(bar.get_width(), 1) for bar in made.axes[0].patches]
    # fedavg has the default rate of 0.01
    assert widths[:3] == [0.2, 0.3, 1.1] and set(widths[6:]) == {0.0}
    with pytest.raises(FedbenchError, match="there is no row 'fedavgm'"):
        draw.gains(rows, "fedavgm", ["global_accuracy"])


def test_rounds_are_a_panel_a_group_and_a_line_a_row(results):
    curves = pd.DataFrame(
        {"mlflow_id": ["0", "0", "1", "1"], "round": [1, 2, 1, 2], "global_accuracy": [10.0, 20.0, 30.0, 40.0]}
    )
    made = draw.rounds(curves, {"0": "fedavg", "1": "fedavg"}, ["global_accuracy", "tail_accuracy"])
    (axes,) = made.axes
    assert list(axes.get_lines()[0].get_ydata()) == [20.0, 30.0]
    with pytest.raises(FedbenchError, match="no curve of any of the metrics"):
        draw.rounds(curves, {}, ["tail_accuracy"])


@pytest.mark.parametrize("suffix", draw.SUFFIXES)
def test_files_are_the_same_every_time(suffix, results, tmp_path):
    series = swept(results[results["row"].str.contains("lr=0.1")], ["fedprox.mu"], "global_accuracy")
    for name in ("one", "two"):
        draw.save(draw.lines(series, "fedprox.mu", "global_accuracy"), tmp_path / (name + suffix))
    assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()
    with pytest.raises(FedbenchError, match="is none of .png, .svg, .pdf"):
        draw.save(draw.lines(series, "fedprox.mu", "global_accuracy"), tmp_path / "one.jpg")


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

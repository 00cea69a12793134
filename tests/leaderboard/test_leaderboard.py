"""The leaderboard's arithmetic, worked out by hand, what may stand in one table, and what readers see."""

import csv
import gzip
import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedbench.cli.app import app
from fedbench.core.errors import FedbenchError
from fedbench.core.files import csv_text
from fedbench.core.records import RoundRecord, RunInfo, RunResult
from fedbench.core.scenario import Scenario
from fedbench.core.spec import RunSpec, Training
from fedbench.core.wording import OWN_MODELS
from fedbench.scenarios.presets import scenario_summary
from fedbench.suites.suite import load_suite
from fedbench.tracking import listener as tracking
from fedbench.tracking import store
from fedbench.tracking.schema import local_artifacts, store_uri
from fedbench.tracking.tags import RunTags
from fedbench_boards.leaderboard import board as boards
from fedbench_boards.leaderboard import own_models
from fedbench_boards.leaderboard.formats import render_terminal, to_csv, to_markdown, write
from fedbench_boards.leaderboard.latex import escape, to_latex
from fedbench_boards.leaderboard.own_models import UNTRAINED_NOTE, is_untrained
from fedbench_boards.leaderboard.page import write_page
from fedbench_boards.leaderboard.reading import ReadingOptions, baseline_named, metric_named
from fedbench_boards.leaderboard.results import _line, load_curves, load_federations, load_results
from fedbench_boards.leaderboard.rows import DIFFER, is_tracked, ranges, reached
from fedbench_boards.leaderboard.tables import RANKS, in_words, text_tables
from fedbench_boards.statistics import Test
from tests.leaderboard.frames import board_of, leaderboard, read_of

LONGTAIL = Scenario(imbalance="exponential", partition="dirichlet", participation=0.4)
# seed -> head, tail; accuracy is between them
FEDAVG = {0: 60.0, 1: 62.0, 2: 67.0}
FEDPROX = {0: 61.0, 1: 65.0, 2: 69.0}


def spec(method: str, seed: int, **given: Any) -> RunSpec:
    params = {"fedprox": {"mu": given.pop("mu", 0.1)}} if method == "fedprox" else {}
    of_training = [name for name in ("rounds", "lr", "local_steps", "precision") if name in given]
    training = Training(**{name: given.pop(name) for name in of_training})
    return RunSpec(method=method, params=params, seed=seed, scenario=LONGTAIL, training=training, **given)


def track(
    listener: tracking.Tracking, spec: RunSpec, accuracy: float, data: Mapping[str, str] = {}, **metrics: float
) -> None:
    """A finished run with this final accuracy, 1.5 MB up, 0.5 MB down, 9 s of training and 12 s in all."""
    info = replace(RunInfo({}, "d" * 64, f"{spec.backbone:w<64}", 20, 8, 400, 80, 6, 24), **data)
    summary = {"global_accuracy": accuracy, "bytes_up": 1.5e6, "bytes_down": 0.5e6, "train_seconds": 9.0, **metrics}
    listener.run_started(spec, info)
    listener.round_finished(spec, RoundRecord(0, (), {"global_accuracy": accuracy}, 0, 0, 0.0))
    listener.run_finished(spec, info, RunResult((), summary, (0, 1), {"w": np.zeros(2)}, 12.0))


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with a suite of two methods on three seeds, tracked once."""
    uri = store_uri(str(tmp_path_factory.mktemp("store")))
    listener = tracking.Tracking(uri, "longtail")
    track(listener, spec("fedavg", 0), 11.0)  # superseded below
    for seed in FEDAVG:
        track(listener, spec("fedavg", seed), FEDAVG[seed], head_accuracy=80.0, tail_accuracy=40.0 + seed)
        track(listener, spec("fedprox", seed), FEDPROX[seed], head_accuracy=79.0, tail_accuracy=50.0 + seed)
    listener.run_failed(spec("fedclip", 0), "no")
    return uri


@pytest.fixture
def results(uri: str) -> pd.DataFrame:
    return load_results(uri, "longtail")


def made(specs: Sequence[tuple[RunSpec, float]], weights: str = "") -> pd.DataFrame:
    """Results as ``load_results`` would give them, without a store; each run started a second after the one before."""
    lines = []
    for number, (one, accuracy) in enumerate(specs):
        tags = {"fedbench.row": one.row, "fedbench.run_id": one.run_id, "fedbench.commit": "c" * 40}
        tags |= {"fedbench.data_hash": "d" * 64, "fedbench.num_clients": "20", "fedbench.weights_hash": weights}
        tags |= {"fedbench.trainable_parameters": "0" if one.method == "clip-zs" else "6"}
        metrics = {"final/global_accuracy": accuracy, "final/bytes_up": 1e6, "final/bytes_down": 1e6}
        data = SimpleNamespace(
            tags=tags,
            params=tracking.flat_params(one),
            metrics={**metrics, "final/seconds": 1.0, "final/train_seconds": 0.5},
        )
        lines.append(
            _line("s", SimpleNamespace(data=data, info=SimpleNamespace(run_id=str(number), start_time=1000 * number)))
        )
    return pd.DataFrame(lines)


def shown(board: pd.DataFrame, width: int = 110) -> str:
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(render_terminal(board_of(board)))
    return capture.get()


def test_results_are_one_line_a_finished_run_and_the_newest_of_its_id(results: pd.DataFrame) -> None:
    assert len(results) == 6
    first = results[(results["method"] == "fedavg") & (results["seed"] == 0)].iloc[0]
    assert first["final/global_accuracy"] == 60.0
    assert first["run_id"] == spec("fedavg", 0).run_id
    assert (first["row"], first["backbone"], first["tune"]) == ("fedavg · clip:embedded", "clip:embedded", "auto")
    assert (first["suite"], first["dataset"], first["rounds"]) == ("longtail", "embedded", "20")
    assert first["scenario"] == "imbalance 100.0, dirichlet(0.5), 40 % participating"
    assert (first["data_hash"], first["num_clients"], first["final/seconds"]) == ("d" * 64, 20, 12.0)


def test_means_stds_and_differences_are_over_seeds(results: pd.DataFrame) -> None:
    board = leaderboard(results).set_index("method")
    fedavg, fedprox = board.loc["fedavg"], board.loc["fedprox"]
    # 60, 62, 67: mean 63, deviations -3, -1, 4, squares 26, over n - 1 = 2: 13
    assert (fedavg["global_accuracy_mean"], fedavg["global_accuracy_std"]) == pytest.approx((63.0, 13**0.5))
    assert (fedavg["tail_accuracy_mean"], fedavg["tail_accuracy_std"]) == pytest.approx((41.0, 1.0))
    assert (fedavg["bytes_up_mean"], fedavg["bytes_down_mean"], fedavg["seconds_mean"]) == (1.5e6, 0.5e6, 12.0)
    # 61-60, 65-62, 69-67 = 1, 3, 2: mean 2, sample std 1; unpaired it would be about 5
    assert (fedprox["delta_mean"], fedprox["delta_std"], fedprox["delta_seeds"], fedprox["seeds"]) == (2.0, 1.0, 3, 3)
    assert np.isnan(fedavg["delta_mean"])
    # unrounded in the file as well
    line = list(csv.DictReader(to_csv(board_of(leaderboard(results))).splitlines()))[1]
    assert float(line["global_accuracy_std"]) == pytest.approx(13**0.5, rel=1e-12)
    assert (line["bytes_up_mean"], line["delta_mean"]) == ("1500000.0", "")


def test_rows_are_sorted_by_accuracy_and_absent_metrics_have_no_column(results: pd.DataFrame) -> None:
    board = leaderboard(results)
    assert board["row"].tolist() == ["fedprox · clip:embedded", "fedavg · clip:embedded"]
    assert "head_accuracy_mean" in board and "worst_client_accuracy_mean" not in board
    chosen = leaderboard(results, ("tail", "never_measured"))
    assert "tail_accuracy_mean" in chosen and "head_accuracy_mean" not in chosen
    assert not [column for column in chosen if "never" in column]


def test_runs_of_another_budget_or_data_set_or_scenario_get_a_table_of_their_own() -> None:
    base = [(spec("fedavg", 0), 60.0), (spec("fedavg", 0, rounds=5), 50.0), (spec("fedavg", 0, dataset="other"), 40.0)]
    iid = spec("fedavg", 0).model_copy(update={"scenario": Scenario()})
    board = leaderboard(made([*base, (iid, 30.0)]))
    assert board["block"].tolist() == [0, 1, 2, 3]
    assert board["global_accuracy_mean"].tolist() == [30.0, 40.0, 50.0, 60.0]  # newest first
    assert "iid, 100 % participating" in board["caption"][0]
    assert board["caption"][1].startswith("other (data dddddddd)")


def test_precisions_share_a_table_that_has_a_column_of_them_and_meet_their_own_baseline() -> None:
    runs = [(spec("fedavg", 0), 50.0), (spec("fedprox", 0), 60.0)]
    [alike] = text_tables(boards.leaderboard(made(runs)))
    assert "precision" not in [column.heading for column in alike.columns]
    half = [(spec("fedavg", 0, precision="bfloat16"), 40.0), (spec("fedclip", 0, precision="bfloat16"), 45.0)]
    board = boards.leaderboard(made([*runs, *half]))
    [table] = text_tables(board)
    [column] = [column for column in table.columns if column.heading == "precision"]
    assert column.is_known  # else the page leaves it out
    names = ["fedprox", "fedavg [precision=float32]", "fedclip", "fedavg [precision=bfloat16]"]
    assert (table.names[0].texts, column.texts) == (names, ["float32", "float32", "bfloat16", "bfloat16"])
    assert [board.lines[place].delta.cell.mean for place in (0, 2)] == [10.0, 5.0]


def test_runs_on_the_same_files_share_a_table_at_whatever_size_their_images_are_decoded() -> None:
    results = made([(spec("fedavg", 0), 60.0), (spec("fedprox", 0), 62.0)])
    results["data_hash"], results["files_hash"] = ["d" * 64, "e" * 64], "f" * 64
    board = leaderboard(results).set_index("label")
    assert set(board["block"]) == {0} and board.loc["fedprox", "delta_mean"] == 2.0
    told = "images are decoded at the size that each row's backbone or teacher takes"
    assert f"embedded (data dddddddd, eeeeeeee) · {told} · " in board["caption"].iloc[0]
    results["files_hash"] = ["f" * 64, "0" * 64]
    board = leaderboard(results)
    assert set(board["block"]) == {0, 1} and not board["caption"].str.contains("decoded").any()


def test_rows_of_other_seeds_share_a_table_that_says_so_and_pairs_over_common_ones() -> None:
    runs = [(spec("fedavg", seed), 60.0 + seed) for seed in range(3)]
    runs += [(spec("fedprox", 1), 66.0), (spec("fedprox", 7), 99.0), (spec("moon", 7), 20.0)]
    board = leaderboard(made(runs)).set_index("label")
    assert set(board["block"]) == {0} and "seeds 0-2, 7" in board["caption"].iloc[0]
    assert board["rank"].to_dict() == {"fedprox": 1, "fedavg": 2, "moon": 3}
    # only seed 1 is common: 66 - 61
    assert (board.loc["fedprox", "delta_mean"], board.loc["fedprox", "delta_seeds"]) == (5.0, 1)
    assert np.isnan(board.loc["fedprox", "delta_std"])
    assert board.loc["moon", ["delta_seeds", "significance"]].tolist() == [0, "no seed in common with the baseline"]
    (table,) = text_tables(board_of(board.reset_index()))
    (seeds,) = [column.texts for column in table.scores if column.heading == "seeds"]
    assert seeds == ["1, 7", "0-2", "7"]
    assert DIFFER in table.notes and "1 to 3 seeds, mean" in table.caption
    # a Δ is of a row that stands in the table
    (delta,) = [column.texts for column in table.scores if column.heading == "Δ fedavg"]
    assert delta == ["+5.0", "–", "–"] and "fedavg" in table.names[0].texts
    (alike,) = text_tables(board_of(leaderboard(made(runs[:3]))))
    assert DIFFER not in alike.notes and "seeds" not in {column.heading for column in alike.scores}


def test_many_seeds_take_little_room() -> None:
    assert [ranges(seeds) for seeds in ([3], [0, 1], [0, 1, 2, 3, 7], [1, 3, 5, 7, 9])] == [
        "3",
        "0, 1",
        "0-3, 7",
        "5 seeds",
    ]


@pytest.mark.parametrize(
    ("specs", "rows"),
    [
        (
            [("fedprox", {"mu": 0.1}), ("fedprox", {"mu": 1.0})],
            ["fedprox · clip:embedded [fedprox.mu=1.0]", "fedprox · clip:embedded [fedprox.mu=0.1]"],
        ),
        (
            [("fedclip", {"label": "mine"}), ("moon", {"label": "mine"})],
            ["mine · clip:embedded [method=moon]", "mine · clip:embedded [method=fedclip]"],
        ),
    ],
)
def test_rows_of_one_name_are_told_apart_and_never_averaged(specs: list[Any], rows: list[str]) -> None:
    board = leaderboard(made([(spec(name, 0, **given), 60.0 + n) for n, (name, given) in enumerate(specs)]))
    assert board["row"].tolist() == rows and board["seeds"].tolist() == [1, 1]


def test_other_weights_under_a_backbones_name_are_another_row() -> None:
    one = [(spec("fedavg", 0), 60.0)]
    both = pd.concat([made(one, "a" * 64), made(one, "b" * 64)], ignore_index=True)
    rows = [f"fedavg · clip:embedded [weights={8 * letter}]" for letter in "ab"]
    assert leaderboard(both)["row"].tolist() == rows


def test_the_terminal_table_fits_and_marks_the_best(results: pd.DataFrame) -> None:
    text = shown(leaderboard(results))
    assert max(len(line) for line in text.splitlines()) <= 110
    assert "65.0 ± 4.0" in text and "63.0 ± 3.6" in text and "+2.0 ± 2.5" in text
    assert "…" not in text
    console = Console(width=110, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(render_terminal(board_of(leaderboard(results))))
    assert "\x1b[1m65.0 ± 4.0\x1b[0m" in capture.get()
    assert "\x1b[1m63.0 ± 3.6\x1b[0m" not in capture.get()


def test_sentences_below_the_table_say_who_leads_and_who_is_best_elsewhere(results: pd.DataFrame) -> None:
    def said(results: pd.DataFrame) -> str:
        (table,) = text_tables(boards.leaderboard(results))
        return in_words(table)

    elsewhere = "Best on head: fedavg (80.0)."  # on the tail it is the first row itself
    tied = "fedprox comes first (accuracy 65.0, +2.0 over fedavg), but can't be told from fedavg."
    assert said(results) == f"{tied} {elsewhere}"
    few = "fedprox comes first (accuracy 61.0, +1.0 over fedavg); too few seeds for a test."
    assert said(results[results["seed"] == 0]) == f"{few} {elsewhere}"
    ahead = results.copy()
    ahead.loc[ahead["method"] == "fedavg", "final/global_accuracy"] -= 20
    assert said(ahead) == f"fedprox leads (accuracy 65.0, +22.0 over fedavg). {elsewhere}"
    assert said(results[results["method"] == "fedavg"]) == ""
    assert tied in " ".join(shown(leaderboard(results)).split())


def test_one_seed_has_no_spread(results: pd.DataFrame) -> None:
    text = shown(leaderboard(results[results["seed"] == 0]))
    assert " 61.0 " in text and "+1.0" in text and "61.0 ±" not in text
    assert "1 seed;" in text


def test_markdown_says_under_which_conditions(results: pd.DataFrame) -> None:
    caption, _, *table = to_markdown(board_of(leaderboard(results))).partition("\n\nAll rows:")[0].splitlines()
    for fact in (
        "embedded (data dddddddd)",
        "40 % participating",
        "20 clients",
        "20 rounds",
        "seeds 0-2",
        "commit",
    ):
        assert fact in caption
    assert table == [
        "| # | method | accuracy | head | tail | Δ fedavg | MB | train s |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 1-2 | fedprox | **65.0 ± 4.0** | 79.0 ± 0.0 | **51.0 ± 1.0** | +2.0 ± 2.5 | 2.00 | 9.0 |",
        "| 1-2 | fedavg | 63.0 ± 3.6 | **80.0 ± 0.0** | 41.0 ± 1.0 | – | 2.00 | 9.0 |",
        "",
        f"#: {RANKS}",
        "",
        "Δ: ± is half of its 95 % interval, not corrected, paired over the seeds both have",
        "",
        "no difference is significant at 0.05: paired t-test over 3 seeds, one row, not corrected",
        "",
        "a paired t-test over 3 seeds finds a difference of 3.3 four times in five (spread 1.0, not corrected); "
        "1.6 needs 6 seeds",
    ]


def test_a_seed_counts_once_however_often_a_run_was_evaluated() -> None:
    often = [(spec("fedavg", seed), 60.0 + 2 * seed) for seed in (0, 1)]
    seldom = [(one.model_copy(update={"training": one.training.model_copy(update={"eval_every": 5})}), a + 1)
              for one, a in often]  # fmt: skip
    (line,) = leaderboard(made([*often, *seldom])).to_dict("records")
    # the newer ones: 61 and 63, mean 62, deviations 1, 1 over n - 1 = 1: std sqrt 2
    assert (line["seeds"], line["global_accuracy_mean"]) == (2, 62.0)
    assert line["global_accuracy_std"] == pytest.approx(2**0.5)


def test_another_headline_ranks_the_rows_and_is_what_differences_are_taken_of(results: pd.DataFrame) -> None:
    board = leaderboard(results, ("global",), headline="head_accuracy")
    assert board["row"].tolist() == ["fedavg · clip:embedded", "fedprox · clip:embedded"]
    assert [name for name in board if name.endswith("_accuracy_mean")] == ["head_accuracy_mean", "global_accuracy_mean"]
    # head 79 against 80 on every seed
    assert board["delta_mean"].tolist()[1] == pytest.approx(-1.0)
    # a table without the headline is ranked by the overall accuracy, and says so
    board = leaderboard(results, headline="mid_accuracy")
    assert board["row"].tolist() == ["fedprox · clip:embedded", "fedavg · clip:embedded"]
    assert board["caption"].str.contains("ranked by global_accuracy, since no row has a mean of mid_accuracy").all()


FIRST, SECOND = "1" * 64, "2" * 64
CODES = [
    {"method": "fedprox", "hash": "a" * 64},
    {"method": "moon", "hash": "b" * 64, "plugin": "mine.py"},
    {"method": "fedclip", "hash": "c" * 64, "package": "some-methods", "version": "2.1"},
]


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"harness_hash": FIRST}, "commit ccccccc"),
        ({"harness_hash": [FIRST, SECOND, SECOND]}, "commit ccccccc · several code states"),
        (
            {"harness_hash": [FIRST, SECOND, SECOND], "commit": "c" * 40 + "+dirty"},
            "ccccccc+dirty (code 11111111), ccccccc+dirty (code 22222222) · several code states",
        ),
        (
            {"method_code": [json.dumps([code]) for code in CODES], "suite_hash": "d" * 64},
            "commit ccccccc · plugin mine.py (bbbbbbbb) · fedclip of some-methods 2.1 (cccccccc) · suite dddddddd",
        ),
    ],
)
def test_captions_say_by_which_code(changes: dict[str, Any], end: str) -> None:
    runs = made([(spec(method, 0), 60.0) for method in ("fedprox", "moon", "fedclip")])
    assert leaderboard(runs.assign(**changes))["caption"].iloc[0].endswith(end)


@pytest.mark.parametrize(
    ("training", "said"),
    [({}, "1 local epoch"), ({"local_steps": 1}, "1 local step"), ({"local_steps": 3}, "3 local steps")],
)
def test_captions_say_how_long_clients_train(training: dict[str, int], said: str) -> None:
    board = leaderboard(made([(spec("fedavg", 0, rounds=5, **training), 60.0)]))
    assert f"5 rounds of {said}, batch 32" in board["caption"].iloc[0]


def of_code(lines: pd.DataFrame, *hashes: str) -> pd.DataFrame:
    """The results with the hash of each run's method, of the same harness; "" for the harness's own."""
    codes = [json.dumps([{"method": m, "hash": h}] if h else []) for m, h in zip(lines["method"], hashes, strict=True)]
    return lines.assign(method_code=codes, harness_hash="1" * 64)


def versions_of_fedprox() -> pd.DataFrame:
    """FedAvg on seeds 0, 1, 2; FedProx's seed 0 by one version of its code, the others by the next."""
    runs = [(spec("fedavg", seed), FEDAVG[seed]) for seed in FEDAVG]
    runs += [(spec("fedprox", seed), FEDPROX[seed]) for seed in FEDPROX]
    return of_code(made(runs), "", "", "", "a" * 64, "b" * 64, "b" * 64)


def test_seeds_by_two_versions_of_a_method_are_two_rows_and_never_one_mean(tmp_path: Path) -> None:
    results = versions_of_fedprox()
    board = leaderboard(results)
    rows = board.set_index("row")
    assert sorted(rows.index) == [
        *("fedavg · clip:embedded", "fedprox · clip:embedded [fedprox.code=aaaaaaaa]"),
        "fedprox · clip:embedded [fedprox.code=bbbbbbbb]",
    ]
    old, new = (rows.loc[f"fedprox · clip:embedded [fedprox.code={8 * letter}]"] for letter in "ab")
    assert (old["seed_list"], old["global_accuracy_mean"]) == ("0", 61.0)
    assert (new["seed_list"], new["global_accuracy_mean"]) == ("1, 2", 67.0)
    # seeds of other code are no pairs: three would have been tested
    assert (new["delta_seeds"], new["delta_mean"]) == (2, 2.5)
    assert new["significance"] == "needs 3 seeds, has 2" and np.isnan(new["p_value"])
    split = "seeds by another version of fedprox are a row of their own"
    assert all(split in caption for caption in board["caption"])
    write(results, board_of(board), tmp_path, "")
    write_page(tmp_path / "page.html", read_of(results, board_of(board)), {}, "")
    texts = [to_csv(board_of(board)), (tmp_path / "leaderboard.md").read_text("utf-8"), to_latex(board_of(board))]
    for text in (*texts, (tmp_path / "page.html").read_text("utf-8"), shown(board)):
        assert all(f"code={8 * letter}" in text for letter in "ab") and "65.0" not in text
    assert baseline_named(results, new.name) == new.name


def test_one_version_of_a_method_is_one_row_whatever_else_changed() -> None:
    results = versions_of_fedprox().assign(harness_hash=["1" * 64, "2" * 64] * 3)
    same = of_code(results, "", "", "", "a" * 64, "a" * 64, "a" * 64).assign(harness_hash=results["harness_hash"])
    board = leaderboard(same)
    assert board["seeds"].tolist() == [3, 3] and not board["row"].str.contains("code").any()
    assert board["caption"].str.contains("several code states").all()


def test_of_two_versions_of_the_baseline_the_newest_is_meant() -> None:
    runs = [(spec("promptfl", seed), mean) for seed, mean in ((0, 50.0), (1, 60.0), (2, 62.0))]
    runs += [(spec("fedprox", seed), 65.0) for seed in (1, 2)]
    results = of_code(made(runs), "a" * 64, "b" * 64, "b" * 64, "c" * 64, "c" * 64)
    line = leaderboard(results, baseline="promptfl").set_index("label").loc["fedprox"]
    assert (line["delta_seeds"], line["delta_mean"], line["baseline_note"]) == (2, 4.0, "")


def test_a_failed_seed_belongs_to_the_version_that_made_it_or_else_to_the_newest() -> None:
    results = versions_of_fedprox()
    lost = made([(spec("fedprox", seed), 0.0) for seed in (7, 8)]).assign(
        failure="no", started=results["started"].max()
    )
    board = leaderboard(results, failed=of_code(lost, "a" * 64, "c" * 64)).set_index("label")
    assert board.loc["fedprox [fedprox.code=aaaaaaaa]", "failure"] == "1 of 2 seeds; seed 7 failed: no"
    assert board.loc["fedprox [fedprox.code=bbbbbbbb]", "failure"] == "2 of 3 seeds; seed 8 failed: no"


def test_only_the_runs_that_count_need_the_headline(results: pd.DataFrame) -> None:
    one = spec("fedavg", 0)
    again = one.model_copy(update={"training": one.training.model_copy(update={"eval_every": 5})})
    lines = made([(one, 60.0), (again, 61.0)]).assign(**{"final/head_accuracy": [np.nan, 80.0]})
    assert leaderboard(lines, headline="head_accuracy")["head_accuracy_mean"].tolist() == [80.0]
    # newest by when it started, wherever it stands
    assert leaderboard(lines.iloc[::-1], headline="head_accuracy")["head_accuracy_mean"].tolist() == [80.0]
    partly = results.assign(**{"final/head_accuracy": results["final/head_accuracy"].where(results["seed"] != 1)})
    assert leaderboard(partly, headline="head_accuracy")["caption"].str.contains("ranked by global_accuracy").all()


def test_each_table_is_followed_by_the_settings_of_its_rows(results: pd.DataFrame, tmp_path: Path) -> None:
    other = results[results["seed"] == 0].assign(seed=4, rounds="5")
    changed = other["row_settings"].str.replace('"training.lr": "0.01"', '"training.lr": "0.5"')
    other["row_settings"] = other["row_settings"].where(other["method"] == "fedavg", changed)
    both = pd.concat([results, other], ignore_index=True)
    write(both, board_of(leaderboard(both)), tmp_path, "")
    text = (tmp_path / "leaderboard.md").read_text("utf-8")
    tables = [part for part in text.split("\n\n") if part.startswith(("| ", "All rows", "- "))]
    assert [part[:5] for part in tables] == ["| # |", "All r", "- fed"] * 2
    lists = {tuple(part.strip().splitlines()) for part in tables[2::3]}
    runs = {name: [f"`{spec(name, seed).run_id}`" for seed in range(3)] for name in ("fedavg", "fedprox")}
    assert (
        f"- fedprox, seeds 0-2: `fedprox.mu=0.1`; runs {' '.join(runs['fedprox'])}",
        f"- fedavg, seeds 0-2; runs {' '.join(runs['fedavg'])}",
    ) in lists
    assert (
        f"- fedprox, seed 4: `fedprox.mu=0.1`, `lr=0.5`; run {runs['fedprox'][0]}",
        f"- fedavg, seed 4: `lr=0.01`; run {runs['fedavg'][0]}",
    ) in lists
    first = next(part for part in tables if part.startswith("All rows") and "`lr=" in part)
    assert "`backbone=clip:embedded`, `tune=auto`" in first and "`optimizer=sgd`" in first and "`lr=0.01`" in first


def test_write_gives_three_files_and_the_command(results: pd.DataFrame, tmp_path: Path) -> None:
    write(results, board_of(leaderboard(results)), tmp_path / "new" / "folder", "fedbench leaderboard --suite longtail")
    folder = tmp_path / "new" / "folder"
    written = ["leaderboard.csv.gz", "leaderboard.md", "results.csv.gz"]
    assert sorted(path.name for path in folder.iterdir()) == written
    assert "```console\n$ fedbench leaderboard --suite longtail\n```" in (folder / "leaderboard.md").read_text("utf-8")
    assert len(pd.read_csv(folder / "results.csv.gz")) == 6
    before = [(folder / name).read_bytes() for name in written]
    write(results, board_of(leaderboard(results)), folder, "fedbench leaderboard --suite longtail")
    assert [(folder / name).read_bytes() for name in written] == before
    # no time and no name: what has changed is told by the bytes
    assert before[0][3:8] == bytes(5)


def test_no_cell_of_a_csv_is_a_formula(tmp_path: Path) -> None:
    label = '=HYPERLINK("http://evil","x")'
    results = made([(spec("fedavg", seed, label=label), 60.0 + seed) for seed in (0, 1)])
    board = leaderboard(results).assign(caption=["@SUM(A1)"], delta_mean=[-2.5], test=["-1.5"])
    write(results, board_of(board), tmp_path, "")
    (tmp_path / "board.csv").write_text(to_csv(board_of(board)), encoding="utf-8")
    for file in ("results.csv.gz", "leaderboard.csv.gz", "board.csv"):
        opener = gzip.open if file.endswith(".gz") else open
        with opener(tmp_path / file, "rt", encoding="utf-8", newline="") as opened:
            line = next(csv.DictReader(opened))
        assert line["label" if "label" in line else "row"].startswith(f"'{label}"), file
    assert (line["caption"], line["delta_mean"], line["test"]) == ("'@SUM(A1)", "-2.5", "-1.5")
    assert pd.read_csv(tmp_path / "leaderboard.csv.gz")["delta_mean"].tolist() == [-2.5]


@pytest.mark.parametrize("text", ["=1", "+1+1", "-1+1", "@x", "\t=1", "\r=1", "\n=1", "＝1+1"])
def test_what_a_spreadsheet_would_calculate_is_text(text: str) -> None:
    frame = pd.DataFrame({text: [text, "a=b", None], "n": [-1, 2, 3]})
    lines = list(csv.reader(io.StringIO(csv_text(frame), newline="")))
    safe = "'" + text.replace("\r", "\n")
    assert lines == [[safe, "n"], [safe, "-1"], ["a=b", "2"], ["", "3"]]


def test_nothing_to_show_says_what_to_run_for_shipped_suites_only(uri: str, tmp_path: Path) -> None:
    none = store_uri(str(tmp_path / "none"))
    for asked in (None, "longtail"):
        with pytest.raises(FedbenchError, match=r"there is no store at .* Run `fedbench run --suite longtail` to fill"):
            load_results(none, asked)
    with pytest.raises(FedbenchError, match=r"there is no store at .*; name yours with --store\.$"):
        load_results(none, "longtial")
    with pytest.raises(FedbenchError, match=r"unknown suite in this store 'longtial'; did you mean 'longtail'\?") as no:
        load_results(uri, "longtial")
    assert "fedbench run" not in str(no.value)
    with pytest.raises(FedbenchError, match=r"'feature-skew'.* Run `fedbench run --suite feature-skew` to fill it\.$"):
        load_results(uri, "feature-skew")
    listener = tracking.Tracking(uri, "only failures")
    listener.run_failed(spec("fedavg", 0), "no")
    with pytest.raises(
        FedbenchError, match=r"has unfinished runs \(1\) of the suite 'only failures' and no finished one"
    ):
        load_results(uri, "only failures")


@pytest.mark.parametrize(
    ("asked", "command"),
    [
        (ReadingOptions(suite="longtail"), "fedbench leaderboard --suite longtail"),
        (
            ReadingOptions(suite="/home/me/my suite.yaml"),
            "fedbench leaderboard --suite 'my suite.yaml'",
        ),
        (ReadingOptions(), "fedbench leaderboard"),
        (
            ReadingOptions(
                metric="tail", columns=("head", "mid"), baseline="fedavg · convnet", target=60, test="wilcoxon"
            ),
            "fedbench leaderboard --metric tail --column head --column mid --baseline 'fedavg · convnet' --target 60 "
            "--test wilcoxon",
        ),
    ],
)
def test_the_stored_command_has_no_paths(asked: ReadingOptions, command: str) -> None:
    assert asked.command == command


@pytest.mark.parametrize(
    ("name", "headline"),
    [
        ("feature-skew", "domain_mean_accuracy"),
        ("leave-one-domain-out", "selected_unseen_domain_accuracy"),
        ("longtail", "global_accuracy"),
    ],
)
def test_a_suite_says_its_headline(name: str, headline: str) -> None:
    assert load_suite(name).headline == headline


def test_the_table_of_a_held_out_domain_fits(results: pd.DataFrame) -> None:
    scores = ("selected_unseen_domain", "unseen_domain", "seen_domain", "domain_mean")
    given = {f"final/{name}_accuracy": results["final/global_accuracy"] for name in scores}
    full = results.assign(**given, row=results["row"].where(results["method"] == "fedavg", "fedprox · clip:b (full)"))
    suite = load_suite("leave-one-domain-out")
    text = shown(leaderboard(full, suite.columns, suite.baseline, suite.headline))
    headings = next(line for line in text.splitlines() if "train s" in line)
    assert headings.split()[:2] == ["#", "method"]
    assert [word for word in ("unseen (selected)", " seen", "domains", "Δ fedavg") if word not in headings] == []
    assert max(len(line) for line in text.splitlines()) <= 110 and "…" not in text


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ({}, "iid"),
        ({"partition": "shards", "participation": 0.1}, "shards(2), 10 % participating"),
        (
            {"partition": "domain", "holdout_domain": "sketch", "labels": "hidden"},
            "domain(1), without sketch, 100 % participating, labels hidden",
        ),
        (
            {"imbalance": "natural", "dropout": 0.25},
            "imbalance natural, iid, 100 % participating, 25 % dropping out",
        ),
        ({"groups": "shots", "partition_seed": 3}, "iid, 100 % participating, groups=shots, partition_seed=3"),
        # with the number that the partition uses
        ({"partition": "dirichlet", "dirichlet_alpha": 0.25}, "dirichlet(0.25)"),
        ({"partition": "creff_equal", "dirichlet_alpha": 0.25}, "creff_equal(0.25)"),
        ({"partition": "shards", "shards_per_client": 7}, "shards(7)"),
        ({"partition": "classes_per_client", "classes_per_client": 7}, "classes_per_client(7)"),
        ({"partition": "domain", "clients_per_domain": 7}, "domain(7)"),
    ],
)
def test_a_scenario_is_told_in_a_few_words(scenario: dict[str, Any], words: str) -> None:
    params = tracking.flat_params(RunSpec(scenario=Scenario().model_copy(update=scenario)))
    own = {name.removeprefix("scenario."): value for name, value in params.items()}
    told = scenario_summary({name: value for name, value in own.items() if name in Scenario.model_fields})
    assert told == (words if "participating" in words else f"{words}, 100 % participating")


def table_of(accuracies: dict[str, list[float]], **given: Any) -> list[tuple[RunSpec, float]]:
    """Runs of several methods on the seeds 0, 1, ..."""
    return [(spec(name, seed, **given), a) for name, values in accuracies.items() for seed, a in enumerate(values)]


def test_differences_are_tested_in_pairs_and_corrected_within_their_table() -> None:
    # differences 10, 10.1, 9.9: t = 10 / (0.1 / sqrt 3), t^2 = 30000; and 1, 2, 3: t^2 = 12; two degrees of freedom:
    # p = 1 - sqrt(t^2 / (t^2 + 2))
    small, large = 1 - (30000 / 30002) ** 0.5, 1 - (12 / 14) ** 0.5
    first = table_of({"fedavg": [60, 62, 67], "fedprox": [70, 72.1, 76.9], "fedclip": [61, 64, 70]})
    second = table_of({"fedavg": [60, 62, 67], "fedprox": [61, 64, 70]}, rounds=5)
    board = leaderboard(made([*second, *first])).set_index(["block", "method"])
    assert board.loc[(0, "fedprox"), "p_value"] == pytest.approx(small, rel=1e-6)
    # Holm over the two rows of this table: the smaller p twice, the larger once
    assert board.loc[(0, "fedprox"), "p_adjusted"] == pytest.approx(2 * small, rel=1e-6)
    assert board.loc[(0, "fedclip"), "p_adjusted"] == pytest.approx(large)
    assert board.loc[(1, "fedprox"), "p_adjusted"] == pytest.approx(large)
    assert board.loc[0, "significance"].to_dict() == {
        "fedprox": "significant",
        "fedclip": "not significant",
        "fedavg": "is the baseline",
    }
    assert set(board["test"]) == {"paired t-test"}
    assert np.isnan(board.loc[(0, "fedavg"), "p_adjusted"])


def test_a_row_without_a_p_value_says_why(results: pd.DataFrame) -> None:
    two = leaderboard(results[results["seed"] < 2]).set_index("method")
    assert two.loc["fedprox", "significance"] == "needs 3 seeds, has 2"
    assert leaderboard(results, baseline="moon")["significance"].tolist() == ["no baseline"] * 2
    wilcoxon = leaderboard(results, test=Test.wilcoxon).set_index("method")
    assert wilcoxon.loc["fedprox", ["significance", "test"]].tolist() == [
        "needs 6 seeds, has 3",
        "Wilcoxon signed-rank test",
    ]
    same = leaderboard(made(table_of({"fedavg": [60, 62, 67], "fedprox": [61, 63, 68]}))).set_index("method")
    assert same.loc["fedprox", "significance"] == "differences are all equal"


def test_the_lines_below_a_table_explain_its_statistics(results: pd.DataFrame) -> None:
    found = made(table_of({"fedavg": [60, 62, 67], "fedprox": [70, 72.1, 76.9], "fedclip": [60, 62, 67]}))
    text = shown(leaderboard(found))
    # differences 10, 10.1, 9.9: 0.1 t_0.975(2) / sqrt 3 = 0.248
    assert "+10.0 ± 0.2 *" in text
    assert "#: the ranks that a row may have" in text and "Δ: ± is half of its 95 % interval" in text
    # t is above its critical 4.30 with power 0.8 at 5.66 standard errors: 5.66 * 0.1 / sqrt 3
    power = "a paired t-test over 3 seeds finds a difference of 0.3 four times in five (spread 0.1, not corrected); 0.2"
    assert f"{power} needs 6 seeds" in " ".join(text.split())
    assert "* p < 0.05, paired t-test over 3 seeds, one row, not corrected" in text
    assert "significance not tested (fedclip): differences are all equal" in text
    assert "significance not tested: needs 3 seeds, has 2" in shown(leaderboard(results[results["seed"] < 2]))
    assert "+10.0 ± 0.2 \\* |" in to_markdown(board_of(leaderboard(found)))


def test_equal_means_share_the_smaller_rank_also_where_noise_parts_them() -> None:
    means = {"fedavg": [60.0], "fedprox": [70.1], "fedclip": [70.1], "moon": [50.0]}
    board = leaderboard(made(table_of(means))).set_index("method")
    assert board["rank"].to_dict() == {"fedprox": 1, "fedclip": 1, "fedavg": 3, "moon": 4}
    assert board.index[2:].tolist() == ["fedavg", "moon"]
    board = leaderboard(made(table_of({"fedavg": [0.3], "fedprox": [0.1 + 0.2]})))
    assert board["global_accuracy_mean"].nunique() == 2 and board["rank"].tolist() == [1, 1]


def test_tuned_rows_stand_beside_untuned_ones_and_meet_the_tuned_baseline() -> None:
    spent = {"study": "s", "trials": "20", "seeds": "0 1", "pruner": "median", "objective": "validation_accuracy"}
    lines = made(
        [
            (spec("fedavg", 0), 60.0),
            (spec("fedavg", 0, lr=0.1, tuned="study of fedavg"), 65.0),
            (spec("fedprox", 0), 61.0),
            (spec("fedprox", 0, lr=0.1, mu=1.0, tuned="study of fedprox"), 69.0),
        ]
    )
    lines["tuning"] = [json.dumps(spent if tuned else {}) for tuned in lines["tuned"]]
    for baseline in ("fedavg", "fedavg · clip:embedded"):
        board = leaderboard(lines, baseline=baseline).set_index("label")
        assert board["block"].nunique() == 1
        assert board["tuned"].to_dict() == {
            "fedprox (tuned)": True,
            "fedavg (tuned)": True,
            "fedprox": False,
            "fedavg": False,
        }
        # 69 - 65 and 61 - 60; the untuned baseline would give 9
        assert (board.loc["fedprox (tuned)", "delta_mean"], board.loc["fedprox", "delta_mean"]) == (4.0, 1.0)
        assert "unequal" not in board["caption"].iloc[0]
    assert "tuned with trials 20, seeds 0 1, pruner median, objective validation_accuracy" in shown(board.reset_index())
    assert "; tuned: study s, trials 20," in to_markdown(board_of(board.reset_index()))
    lines.loc[lines["tuned"] == "study of fedprox", "tuning"] = json.dumps({**spent, "trials": "40"})
    assert leaderboard(lines)["caption"].iloc[0].endswith("tuned with unequal budgets")
    alone = leaderboard(lines, baseline="fedavg · clip:embedded (tuned)").set_index("label")
    assert alone.loc["fedprox", "delta_mean"] == -4.0


AVG, PROX, TUNED = ("fedavg", 60.0, {}), ("fedprox", 61.0, {}), ("fedprox", 69.0, {"lr": 0.1, "tuned": "study"})
ON_CONVNET, FULL = {"backbone": "convnet"}, {"tune": "full"}
SCALED = ("fedavg", 70.0, {"label": "fedavg at CLIP's scale", "head_scale": 1.0})
RATES = [("fedavg", 60.0, {"lr": 0.01}), ("fedavg", 50.0, {"lr": 0.1})]
PLAIN, ROW = "fedavg", "fedavg · clip:embedded"
MET: list[tuple[list[Any], str, dict[str, float | str]]] = [
    # on the row's own backbone, by a method's name; a whole row is met by every row
    (
        [AVG, PROX, ("fedavg", 30.0, ON_CONVNET), ("fedprox", 31.0, ON_CONVNET)],
        PLAIN,
        {"fedprox · clip:embedded": 1.0, "fedprox · convnet": 1.0},
    ),
    (
        [AVG, PROX, ("fedavg", 30.0, ON_CONVNET), ("fedprox", 31.0, ON_CONVNET)],
        ROW,
        {"fedprox · clip:embedded": 1.0, "fedprox · convnet": -29.0},
    ),
    (
        [AVG, PROX, ("fedprox", 99.0, ON_CONVNET)],
        PLAIN,
        {"fedprox · clip:embedded": 1.0, "fedprox · convnet": "no fedavg on convnet"},
    ),
    ([AVG, ("fedprox", 65.0, ON_CONVNET | {"tuned": "study"})], ROW, {"fedprox · convnet (tuned)": 5.0}),
    # tuned like the row, unless there is nothing to tune
    ([("clip-zs", 50.0, {}), TUNED], "clip-zs", {"fedprox · clip:embedded (tuned)": 19.0}),
    ([AVG, PROX, TUNED], PLAIN, {"fedprox · clip:embedded (tuned)": "no tuned fedavg", "fedprox · clip:embedded": 1.0}),
    (
        [("fedavg", 60.0, {"tuned": "study"}), PROX, TUNED],
        PLAIN,
        {"fedprox · clip:embedded (tuned)": 9.0, "fedprox · clip:embedded": "no untuned fedavg"},
    ),
    # of what is trained as well
    (
        [AVG, ("fedavg", 70.0, FULL), PROX, ("fedprox", 72.0, FULL)],
        PLAIN,
        {"fedprox · clip:embedded": 1.0, "fedprox · clip:embedded (full)": 2.0},
    ),
    ([AVG, PROX, ("fedprox", 72.0, FULL)], PLAIN, {"fedprox · clip:embedded (full)": "no fedavg (full)"}),
    # of several rows of a method the one that is called so; where none is, its only row
    ([AVG, SCALED, PROX], PLAIN, {"fedprox · clip:embedded": 1.0, "fedavg at CLIP's scale · clip:embedded": 10.0}),
    ([SCALED, PROX], PLAIN, {"fedprox · clip:embedded": -9.0}),
    # of rows called alike the one with the row's settings
    ([*RATES, ("fedprox", 55.0, {"lr": 0.1})], PLAIN, {"fedprox · clip:embedded": 5.0}),
    (
        [*RATES, ("fedprox", 55.0, {"lr": 0.5})],
        PLAIN,
        {"fedprox · clip:embedded": "2 rows are called fedavg; give --baseline ROW"},
    ),
    ([*RATES, ("fedprox", 55.0, {"lr": 0.5})], "fedavg · clip:embedded [lr=0.1]", {"fedprox · clip:embedded": 5.0}),
]


@pytest.mark.parametrize(("runs", "baseline", "met"), MET)
def test_a_row_meets_the_baseline_that_is_like_it_or_says_why_there_is_none(
    runs: list[Any], baseline: str, met: dict[str, float | str]
) -> None:
    results = made([(spec(method, 0, **given), accuracy) for method, accuracy, given in runs])
    assert baseline_named(results, baseline) == baseline
    board = leaderboard(results, baseline=baseline).set_index("row")
    for row, wanted in met.items():
        line = board.loc[row]
        if isinstance(wanted, str):
            assert (line["baseline_note"], line["significance"]) == (wanted, "no baseline")
            assert np.isnan(line["delta_mean"])
            for text in (shown(board.reset_index()), to_markdown(board_of(board.reset_index()))):
                assert f"no baseline for {line['label']}" in text and wanted in " ".join(text.split())
        else:
            assert (line["delta_mean"], line["baseline_note"]) == (wanted, "")


def test_a_metric_that_a_seed_lacks_has_no_mean_and_gives_no_rank() -> None:
    runs = made(table_of({"fedavg": [60, 62, 64], "fedprox": [70, 72, 74]}))
    runs["final/tail_accuracy"] = [10.0, 30.0, 20.0, np.nan, 40.0, 50.0]
    runs["final/train_seconds"] = [1.0, 3.0, 2.0, 1.0, np.nan, 1.0]
    board = leaderboard(runs, ("tail",)).set_index("method")
    assert board.loc["fedavg", ["tail_accuracy_mean", "train_seconds_mean"]].tolist() == [20.0, 2.0]
    assert board.loc["fedprox", ["tail_accuracy_mean", "tail_accuracy_std", "train_seconds_mean"]].isna().all()
    assert board["incomplete"].to_dict() == {"fedprox": '["tail_accuracy"]', "fedavg": "[]"}
    assert "no mean of tail for fedprox, which some seed lacks" in shown(board.reset_index())
    runs.loc[3, "final/global_accuracy"] = np.nan
    board = leaderboard(runs)
    assert board["method"].tolist() == ["fedavg", "fedprox"] and board["rank"].tolist() == [1, pd.NA]
    assert "no mean of accuracy for fedprox, which some seed lacks, without a rank" in shown(board)


def test_a_headline_that_only_some_rows_have_ranks_them_and_leaves_the_others_a_dash() -> None:
    runs = made(table_of({"fedavg": [60, 62], "fedprox": [50, 52], "moon": [40, 42]}))
    own = "personal_mean_client_accuracy"
    runs[f"final/{own}"] = [np.nan, np.nan, 80.0, 82.0, 90.0, 92.0]
    board = leaderboard(runs, headline=own)
    assert board["label"].tolist() == ["moon", "fedprox", "fedavg"] and board["rank"].tolist() == [1, 2, pd.NA]
    assert set(board["headline"]) == {own} and "ranked by" not in board["caption"].iloc[0]
    (table,) = text_tables(board_of(board))
    assert table.scores[0].heading == "own models" and table.scores[0].texts[2] == table.rank.texts[2] == "–"
    for name in ("personal_mean_client", own, "own models", "own_models"):
        assert metric_named(runs, name) == own
    runs[f"final/{own}"] = np.nan
    with pytest.raises(FedbenchError, match=r"unknown accuracy .* 'own_models'. Known: global"):
        metric_named(runs, "own_models")


def test_tables_in_which_no_row_has_the_metric_are_counted_aloud(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedbench_boards.leaderboard import results as module

    line = module._line

    def in_two_tables(suite: str, run: Any) -> dict[str, Any]:
        is_prox = run.data.params["method"] == "fedprox"
        own = {"final/personal_mean_client_accuracy": 80.0, "rounds": "5"} if is_prox else {}
        return {**line(suite, run), **own}

    monkeypatch.setattr(module, "_line", in_two_tables)
    done = invoke(uri, "--metric", "personal_mean_client")
    said = " ".join(done.stderr.split())
    assert done.exit_code == 0
    assert "1 of 2 tables have no row with a mean of 'personal_mean_client' and are ranked by the overall" in said
    assert "ranked by" not in invoke(uri, "--metric", "tail").stderr


@pytest.mark.parametrize("columns", [(), ("head", "mid", "tail"), ("worst_client",)])
def test_own_models_are_shown_whatever_columns_a_suite_has(columns: tuple[str, ...]) -> None:
    runs = made(table_of({"fedavg": [60, 62], "fedprox": [50, 52]}))
    runs["final/worst_client_accuracy"] = 30.0
    runs["final/personal_mean_client_accuracy"] = [np.nan, np.nan, 80.0, 82.0]
    runs["final/personal_worst_client_accuracy"] = [np.nan, np.nan, 70.0, 70.0]
    elsewhere = made(table_of({"fedavg": [10.0]}, rounds=5))
    both, alone = text_tables(board_of(leaderboard(pd.concat([runs, elsewhere]), columns)))
    found = {column.heading: column.texts for column in both.scores}
    assert found["own models"] == ["–", "81.0 ± 1.4"] and OWN_MODELS in both.notes
    # beside the worst client of the global model
    assert ("worst own model" in found) == ("worst client" in found) == ("head" not in columns)
    assert not {"own models", "worst own model"} & {column.heading for column in alone.scores}
    assert OWN_MODELS not in alone.notes


def test_ranked_by_own_models_a_row_without_is_there_by_its_global_model_over_the_same_clients() -> None:
    runs = made(table_of({"fedavg": [60, 62, 64], "fedprox": [50, 51, 52], "moon": [10, 10, 10]}))
    runs["untrained"] = runs["method"] == "moon"
    runs["final/mean_client_accuracy"] = [70.0, 71.0, 72.0, 30.0, 30.0, 30.0, 5.0, 5.0, 5.0]
    runs["final/personal_mean_client_accuracy"] = [np.nan] * 3 + [80.0, 82.0, 81.0] + [np.nan] * 3
    board = leaderboard(runs, headline="personal_mean_client_accuracy")
    assert board["label"].tolist() == ["fedprox", "fedavg", "moon"] and board["rank"].tolist() == [1, 2, pd.NA]
    by_label = board.set_index("label")
    assert by_label["personal_mean_client_accuracy_mean"].tolist()[:2] == [81.0, 71.0]
    # 10, 11 and 9 over the three seeds
    assert by_label.loc["fedprox", "delta_mean"] == 10.0 and by_label.loc["fedprox", "delta_seeds"] == 3
    assert by_label["one_for_all"].to_dict() == {"fedprox": False, "fedavg": True, "moon": False}
    text = shown(board)
    assert f"§ {own_models.ONE_FOR_ALL_NOTE}" in text and re.search(r"^2  fedavg §", text, re.M)
    assert r"fedavg\S{}" in to_latex(board_of(board))
    # the global model's own column and other boards are as ever
    plain = leaderboard(runs).set_index("label")
    assert not plain["one_for_all"].any() and math.isnan(plain.loc["fedavg", "personal_mean_client_accuracy_mean"])
    # beside a table ranked by own models, one ranked otherwise has the global model's numbers in their column too
    beside = leaderboard(runs.assign(setting="a"), headlines={"elsewhere": "personal_mean_client_accuracy"})
    assert beside.set_index("label")["one_for_all"].to_dict() == {"fedprox": False, "fedavg": True, "moon": False}
    assert re.search(r"fedavg § .* 71\.0 ± 1\.0", shown(beside, width=200))


DEFAULTS, ITS_OWN = '{"evaluate": "fedavg"}', '{"evaluate": "mine, fedavg"}'


@pytest.mark.parametrize(
    ("trainable", "round_bytes", "sent", "owners", "untrained"),
    [
        ("6", "24", 48.0, DEFAULTS, False),
        ("0", "0", 0.0, DEFAULTS, False),  # zero-shot: there is nothing to train
        ("6", "0", 0.0, ITS_OWN, True),
        ("6", "0", 9.0, DEFAULTS, True),  # only reports are sent, no tensor of the model
        ("6", "0", 9.0, ITS_OWN, False),  # by which the method may predict
    ],
)
def test_what_is_recorded_tells_an_untrained_global_model(
    trainable: str, round_bytes: str, sent: float, owners: str, untrained: bool
) -> None:
    tags = {"trainable_parameters": trainable, "round_bytes": round_bytes, "owners": owners}
    known = {f"fedbench.{name}": value for name, value in tags.items()}
    metrics = {"final/global_accuracy": 60.0, "final/bytes_up": sent, "final/bytes_down": sent}
    assert is_untrained("mine", RunTags(known), metrics) is untrained
    # without a global model there is no accuracy of one
    del metrics["final/global_accuracy"]
    assert not is_untrained("mine", RunTags(known), metrics)


def test_an_untrained_global_model_has_a_mark_and_no_rank_in_every_format(tmp_path: Path) -> None:
    runs = made(table_of({"fedavg": [60, 62], "fedprox": [70, 72], "clip-zs": [65, 65]}))
    runs["untrained"] = runs["method"] == "fedprox"
    runs["final/personal_mean_client_accuracy"] = [50.0, 50.0, 90.0, 92.0, np.nan, np.nan]
    board = leaderboard(runs)
    assert board["label"].tolist() == ["clip-zs", "fedavg", "fedprox"] and board["rank"].tolist() == [1, 2, pd.NA]
    assert f"‡ {UNTRAINED_NOTE}" in shown(board) and re.search(r"^–  fedprox ‡", shown(board), re.M)
    markdown = to_markdown(board_of(board))
    # the best own models are its
    assert re.search(r"^\| – \| fedprox ‡ \| 71\.0 ± 1\.4 \| \*\*91\.0 ± 1\.4\*\* \|", markdown, re.M)
    assert f"‡ {UNTRAINED_NOTE}" in markdown and r"-- & fedprox\ddag{} &" in to_latex(board_of(board))
    (tmp_path / "board.csv").write_text(to_csv(board_of(board)), encoding="utf-8")
    assert pd.read_csv(tmp_path / "board.csv").set_index("label")["untrained"].to_dict() == {
        "clip-zs": False,
        "fedavg": False,
        "fedprox": True,
    }
    own = leaderboard(runs, headline="personal_mean_client_accuracy")
    assert own["label"].tolist() == ["fedprox", "fedavg", "clip-zs"] and own["rank"].tolist() == [1, 2, pd.NA]


def test_all_that_look_best_are_bold_and_what_looks_worse_is_not() -> None:
    table = to_markdown(board_of(leaderboard(made(table_of({"fedavg": [65.04], "fedprox": [64.96], "moon": [64.94]})))))
    assert re.findall(r"\| \*\*65\.0\*\* \|", table) == ["| **65.0** |"] * 2 and "| 64.9 |" in table


def test_markdown_keeps_a_name_in_its_cell() -> None:
    odd = "a|b\nc  <i> `d` *e*"
    runs = made([(spec("fedavg", 0, label=odd, text_encoder="x`y"), 60.0)])
    text = to_markdown(board_of(leaderboard(runs)))
    name = "a\\|b c &lt;i> \\`d\\` \\*e\\*"
    assert f"| 1 | {name} | 60.0 |" in text and f"- {name}, seed 0;" in text
    assert "`` text_encoder=x`y ``" in text


def test_the_target_says_whose_baseline_it_is() -> None:
    def target(*specs: tuple[RunSpec, float]) -> str:
        results = made(specs)
        ends = zip(results["mlflow_id"], results["final/global_accuracy"], strict=True)
        curves = pd.DataFrame([{"mlflow_id": one, "round": 1, "global_accuracy": last} for one, last in ends])
        return str(leaderboard(results, curves=curves)["caption"].iloc[0].rpartition("target ")[2])

    plain, tuned = (spec("fedavg", 0), 60.0), (spec("fedavg", 0, tuned="study"), 65.0)
    other = (spec("fedavg", 0, backbone="convnet"), 30.0)
    ends = "the mean global_accuracy that fedavg ends with"
    assert target(plain) == f"60.0, {ends}"
    assert target(plain, other) == f"30.0 or 60.0, {ends} on the row's backbone"
    whole = (spec("fedavg", 0, label="whole", tune="full"), 70.0)
    assert target(plain, whole) == f"60.0 or 70.0, {ends} at the row's settings"
    both = f"30.0 or 60.0 or 70.0, {ends} on the row's backbone, at the row's settings"
    assert target(plain, whole, other) == both
    assert target(plain, tuned) == f"60.0 or 65.0, {ends} tuned or not like the row"
    assert (
        target(plain, tuned, other) == f"30.0 or 60.0 or 65.0, {ends} on the row's backbone, tuned or not like the row"
    )


@pytest.mark.parametrize(
    ("curve", "target", "rounds"),
    [
        ({0: 0.2, 1: 0.3}, 0.1 + 0.2, 1),  # but for noise
        ({0: 0.2, 1: 0.3}, 0.3 + 1e-6, None),
        ({0: 9, 2: 6, 4: 3}, 6.0, 0),
    ],
)
def test_the_first_round_at_a_target_counts(curve: dict[int, float], target: float, rounds: int | None) -> None:
    curves = pd.DataFrame({"mlflow_id": "a", "round": list(curve), "global_accuracy": list(curve.values())})
    first = reached(curves, ["a"], "global_accuracy", target)["round"]
    assert [None if math.isnan(number) else number for number in first] == [rounds]


def test_a_target_of_a_metric_of_which_less_is_better_is_reached_from_above() -> None:
    spread = "std_client_accuracy"
    curves = pd.DataFrame({"mlflow_id": ["a"] * 3 + ["b"] * 3, "round": [0, 2, 4] * 2, spread: [9, 6, 3, 9, 8, 7]})
    first = reached(curves, ["a", "b"], spread, 6.0)["round"]
    assert first["a"] == 2 and list(first.index) == ["a", "b"] and math.isnan(first["b"])


def test_a_metric_of_which_neither_more_nor_less_is_better_has_no_target() -> None:
    results = made(table_of({"fedavg": [60]}))
    results["final/prediction_entropy"] = 1.0
    curves = pd.DataFrame({"mlflow_id": list(results["mlflow_id"]), "round": 1, "prediction_entropy": 1.0})
    board = boards.leaderboard(results, headline="prediction_entropy", curves=curves)
    assert "target" not in board.tables[0].caption and not board.tables[0].lines[0].milestone.text


def test_a_metric_is_tracked_where_every_evaluated_round_of_the_runs_has_it() -> None:
    curves = pd.DataFrame({"mlflow_id": ["a", "a", "b"], "round": [0, 1, 0], "head": [1.0, 2.0, np.nan]})
    assert is_tracked(curves, ["a"], "head")
    assert not is_tracked(curves, ["a", "b"], "head") and not is_tracked(curves, ["b"], "head")
    assert not is_tracked(curves, ["c"], "head") and not is_tracked(curves, ["a"], "tail")


def curves_of(results: pd.DataFrame, accuracies: dict[tuple[str, int], list[float]]) -> pd.DataFrame:
    """Curves with an evaluation every second round, by method and seed."""
    ids = results.set_index(["method", "seed"])["mlflow_id"]
    return pd.DataFrame(
        [
            {"mlflow_id": ids[key], "round": 2 * number, "global_accuracy": accuracy}
            for key, values in accuracies.items()
            for number, accuracy in enumerate(values)
        ]
    )


def test_what_is_spent_until_a_target_is_a_mean_over_the_seeds_that_reach_it() -> None:
    results = made(table_of({"fedavg": [60, 64]}))
    curves = curves_of(results, {("fedavg", 0): [10, 50, 60], ("fedavg", 1): [10, 62, 64]})
    curves["bytes_total"] = [0, 4e6, 8e6, 0, 3e6, 6e6]
    [row] = leaderboard(results, curves=curves, target=61).to_dict("records")
    # the second seed reaches it in round 2, the first never does
    assert (row["rounds_to_target_mean"], row["bytes_to_target_mean"]) == (2.0, 3e6)
    assert np.isnan(row["seconds_to_target_mean"])  # runs of a version that kept no seconds
    [row] = leaderboard(results, curves=curves, target=60).to_dict("records")
    assert (row["rounds_to_target_mean"], row["bytes_to_target_mean"]) == (3.0, 5.5e6)


def test_rounds_to_target_are_the_first_evaluated_ones_at_what_the_baseline_ends_with() -> None:
    results = made(table_of({"fedavg": [60, 64], "fedprox": [66, 61]}))
    curves = curves_of(
        results,
        {
            ("fedavg", 0): [10, 50, 60],
            ("fedavg", 1): [10, 62, 64],
            # the first time counts, not the last; at the target is enough
            ("fedprox", 0): [10, 62, 40, 66],
            ("fedprox", 1): [10, 20, 61],
        },
    )
    board = leaderboard(results, curves=curves).set_index("method")
    assert set(board["target"]) == {62.0}
    assert board["target_reached"].to_dict() == {"fedavg": "1/2", "fedprox": "1/2"}
    assert board["rounds_to_target_mean"].to_dict() == {"fedavg": 2.0, "fedprox": 2.0}
    assert "target 62.0, the mean global_accuracy that fedavg ends with" in board["caption"].iloc[0]
    assert "2 (1/2)" in shown(board.reset_index())
    lower = leaderboard(results, curves=curves, target=61).set_index("method")
    # fedprox: rounds 2 and 4, mean 3, std sqrt 2
    assert (lower.loc["fedprox", "rounds_to_target_mean"], lower.loc["fedprox", "target_reached"]) == (3.0, "2/2")
    assert lower.loc["fedprox", "rounds_to_target_std"] == pytest.approx(2**0.5)
    assert "target 61 (global_accuracy)" in lower["caption"].iloc[0]
    never = leaderboard(results, curves=curves, target=99).set_index("method")
    assert never.loc["fedprox", "target_reached"] == "0/2" and np.isnan(never.loc["fedprox", "rounds_to_target_mean"])
    assert " never" in shown(never.reset_index())
    assert "rounds_to_target" not in shown(leaderboard(results))


def test_a_headline_without_a_curve_leaves_the_overall_accuracy_to_count_rounds_by() -> None:
    results = made(table_of({"fedavg": [60], "fedprox": [66]})).assign(**{"final/worst_client_accuracy": [30.0, 20.0]})
    curves = curves_of(results, {("fedavg", 0): [10, 60], ("fedprox", 0): [10, 66]})
    board = leaderboard(results, headline="worst_client_accuracy", curves=curves).set_index("method")
    assert (board["target"].iloc[0], board["target_metric"].iloc[0]) == (60.0, "global_accuracy")
    tracked = curves.assign(worst_client_accuracy=[0.0, 30.0, 5.0, 20.0])
    board = leaderboard(results, headline="worst_client_accuracy", curves=tracked).set_index("method")
    assert (board["target"].iloc[0], board["target_metric"].iloc[0]) == (30.0, "worst_client_accuracy")
    assert board["target_reached"].to_dict() == {"fedavg": "1/1", "fedprox": "0/1"}


def test_a_target_is_not_taken_of_a_baseline_without_a_mean() -> None:
    results = made(table_of({"fedavg": [60, 64], "fedprox": [66, 61]}))
    curves = curves_of(results, {("fedavg", 0): [60], ("fedprox", 0): [66], ("fedprox", 1): [61]})
    results.loc[1, "final/global_accuracy"] = np.nan
    assert set(leaderboard(results, curves=curves)["target_reached"]) == {""}


def test_every_number_is_traceable_to_its_runs(results: pd.DataFrame) -> None:
    line = leaderboard(results).set_index("method").loc["fedprox"]
    assert json.loads(line["runs"]) == {str(seed): spec("fedprox", seed).run_id for seed in range(3)}
    own = results[results["method"] == "fedprox"].sort_values("seed")
    assert list(json.loads(line["mlflow_ids"]).values()) == own["mlflow_id"].tolist()
    told = ["label", "setting", "dataset", "scenario", "backbone", "headline", "tuning"]
    assert line[told].tolist() == [
        "fedprox",
        "",
        "embedded",
        "imbalance 100.0, dirichlet(0.5), 40 % participating",
        "clip:embedded",
        "global_accuracy",
        "{}",
    ]


def test_domains_are_in_the_csv_always_and_in_tables_where_asked_for(results: pd.DataFrame) -> None:
    by_domain = results.assign(**{"final/domain_accuracy/photo": 50.0, "final/domain_accuracy/sketch": 40.0})
    board = leaderboard(by_domain, ("tail",))
    assert board["domain_accuracy/photo_mean"].tolist() == [50.0, 50.0]
    assert board["domain_accuracy/sketch_std"].tolist() == [0.0, 0.0]
    assert " photo " not in shown(board)
    assert " photo " in shown(leaderboard(by_domain, ("domain_accuracy",)))


def test_a_metric_or_baseline_that_no_run_has_is_refused(results: pd.DataFrame) -> None:
    assert metric_named(results, "tail") == metric_named(results, "tail_accuracy") == "tail_accuracy"
    with pytest.raises(FedbenchError, match=r"'tial'; did you mean 'tail'"):
        metric_named(results, "tial")
    with pytest.raises(FedbenchError, match="'bytes_up'"):
        metric_named(results, "bytes_up")
    assert baseline_named(results, "fedprox · clip:embedded")
    with pytest.raises(FedbenchError, match="'fedavgg'; did you mean 'fedavg"):
        baseline_named(results, "fedavgg")


def test_a_table_too_wide_names_backbones_by_letters_and_then_takes_a_second_one() -> None:
    both = table_of({"fedavg": [60, 61], "clip-linear-centralized": [50, 52]}, backbone="convnet?projector=128")
    results = made([*both, *table_of({"fedavg": [60, 61]})])
    results["final/head_accuracy"] = results["final/tail_accuracy"] = results["final/global_accuracy"]
    board = leaderboard(results)
    full, lettered, split = (shown(board, width) for width in (130, 100, 86))
    assert "clip-linear-centralized · convnet?projector=128" in full and "on: A" not in full
    assert "on: A = convnet?projector=128, B = clip:embedded" in lettered
    assert " · convnet" not in lettered.partition("comes first")[0].rpartition("\n")[0]
    assert len(re.findall("clip-linear-centralized ", split)) == 2
    for text, width in ((full, 130), (lettered, 100), (split, 86)):
        assert max(len(line) for line in text.splitlines()) <= width and "…" not in text


def test_latex_has_an_environment_a_table_and_no_bare_special_characters(results: pd.DataFrame) -> None:
    odd = results.assign(row=[f"a_b & {{c}} 50 % #1 ^~\\ · {name}" for name in results["method"]], rounds="5")
    text = to_latex(board_of(leaderboard(pd.concat([results, odd], ignore_index=True))))
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == 2
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == text.count(r"\toprule") == 2
    assert r"a\_b \& \{c\} 50 \% \#1 \textasciicircum{}\textasciitilde{}\textbackslash{}" in text
    assert r"\textbf{65.0 $\pm$ 4.0}" in text and r"$\Delta$ fedavg" in text
    assert text.count("{!}{%\n\\begin{tabular}") == text.count("\\end{tabular}}\n") == 2
    # the first line is a comment; a wide table is made smaller
    body = text.partition("\n\n")[2].replace("{!}{%", "{!}").replace(r"{tabular}}", r"{tabular}")
    assert not re.findall(r"(?<!\\)[%#_]", body)
    for line in body.splitlines():
        depth = re.sub(r"\\[{}]", "", line)
        assert depth.count("{") == depth.count("}"), line
        assert line.count("$") % 2 == 0, line
    rows = [line for line in body.splitlines() if line.endswith(r" \\")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in rows} == {7}


def test_latex_sets_a_minus_and_no_hyphen_before_a_number(results: pd.DataFrame) -> None:
    text = to_latex(board_of(leaderboard(results, baseline="fedprox")))
    assert r"$-$2.0 $\pm$ 2.5" in text and "-2.0" not in text


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("clip2fl β=3 ≠ 73 – *", r"clip2fl $\beta$=3 $\neq$ 73 -- $^{*}$"),
        ("a\n\nb → c × d ≈ e", r"a b $\rightarrow$ c $\times$ d $\approx$ e"),
    ],
)
def test_latex_leaves_no_letter_that_its_fonts_lack_nor_a_second_line(text: str, escaped: str) -> None:
    assert escape(text) == escaped


@pytest.fixture(scope="module")
def curved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of one run with three rounds, the middle one not evaluated, and one run without a curve."""
    uri = store_uri(str(tmp_path_factory.mktemp("curved")))
    listener = tracking.Tracking(uri, "longtail")
    for one, evaluated in ((spec("fedavg", 0), {0: 10.0, 2: 30.0}), (spec("fedavg", 1), {})):
        counts = {"classnames": ("cat", "dog"), "class_counts": ((3, 4),), "groups": {"head": (0,)}}
        info = RunInfo({}, "d" * 64, "", 1, 1, 7, 8, 6, 24, **counts)
        listener.run_started(one, info)
        for number in range(3):
            metrics = {"train_loss": 1.0}
            if number in evaluated:
                metrics |= {"global_accuracy": evaluated[number], "head_accuracy": 2 * evaluated[number]}
            listener.round_finished(one, RoundRecord(number, (), metrics, 100, 50, 0.1))
        summary = {"global_accuracy": 30.0, "head_accuracy": 60.0, "bytes_up": 300.0, "bytes_down": 150.0}
        listener.run_finished(one, info, RunResult((), summary, (0, 1), {"w": np.zeros(2)}, 1.0))
    return uri


def test_curves_are_a_line_an_evaluated_round_with_traffic_so_far(curved: str) -> None:
    results = load_results(curved, "longtail")
    curves = load_curves(curved, results, "never_measured")
    assert curves.columns.tolist() == [
        "mlflow_id",
        "run_id",
        "round",
        "global_accuracy",
        "head_accuracy",
        "bytes_total",
        "seconds_total",
    ]
    # 100 up and 50 down a round, and a tenth of a second: 150 after round 0, 450 after round 2
    assert curves[["round", "global_accuracy", "head_accuracy", "bytes_total"]].to_numpy().tolist() == [
        [0, 10, 20, 150],
        [2, 30, 60, 450],
    ]
    assert curves["seconds_total"].tolist() == pytest.approx([0.1, 0.3])
    assert set(curves["run_id"]) == {spec("fedavg", 0).run_id}
    assert load_curves(curved, results.iloc[:0]).empty
    board = leaderboard(results, curves=curves, target=30)
    assert board["target_reached"].tolist() == ["1/1"] and board["rounds_to_target_mean"].tolist() == [2.0]
    assert board["bytes_to_target_mean"].tolist() == [450]
    assert board["seconds_to_target_mean"].tolist() == [pytest.approx(0.3)]
    assert "MB to it" in shown(board)


def test_federations_are_read_by_run_and_left_out_where_a_run_has_none(curved: str) -> None:
    results = load_results(curved, "longtail")
    with_it, without = results["mlflow_id"]
    counts = {"classnames": ["cat", "dog"], "class_counts": [[3, 4]], "groups": {"head": [0]}}
    assert load_federations(curved, results) == {with_it: counts, without: counts}
    client = store.open_store(curved, create=False)
    folder = Path(client.get_run(without).info.artifact_uri.removeprefix("file://"))
    (folder / "federation.json").unlink()
    assert load_federations(curved, results) == {with_it: counts}
    (folder / "federation.json").write_text("{")
    with pytest.raises(FedbenchError, match=f"federation.json of run {without} can't be read"):
        load_federations(curved, results)
    (folder / "federation.json").unlink()
    assert load_federations(curved, results.iloc[1:]) == {}


def test_a_store_that_was_moved_keeps_its_federations(curved: str, tmp_path: Path) -> None:
    old = Path(curved.removeprefix("sqlite:///")).parent
    moved = tmp_path / "moved"
    shutil.copytree(old, moved)
    uri = store_uri(str(moved))
    away = old.with_name("away")
    old.rename(away)
    try:
        results = load_results(uri, "longtail")
        assert len(load_federations(uri, results)) >= 1
        run = store.open_store(uri, create=False).get_run(results["mlflow_id"][0])
        assert local_artifacts(uri, run) == moved / "artifacts" / "longtail" / run.info.run_id / "artifacts"
        shutil.rmtree(moved / "artifacts")
        assert load_federations(uri, results) == {}
        with pytest.raises(FedbenchError, match=f"are not in '{old}.*', where they were written, nor in '{moved}"):
            local_artifacts(uri, run)
        done = invoke(uri, "--format", "html")
        assert done.exit_code == 0 and "2 of 2 runs have no federation.json" in " ".join(done.stderr.split())
    finally:
        away.rename(old)


def test_a_purged_command_leaves_its_runs_without_one(uri: str, results: pd.DataFrame) -> None:
    run = results["mlflow_id"][0]
    file = local_artifacts(uri, store.open_store(uri, create=False).get_run(run)) / "run.json"
    whole = file.read_text()
    try:
        for purged in ("0" * 32, "../no id"):
            content = json.loads(whole)
            content["tags"]["mlflow.parentRunId"] = purged
            file.write_text(json.dumps(content))
            again = load_results(uri, "longtail").set_index("mlflow_id")
            assert again.loc[run, "made_by"] == "[]"
    finally:
        file.write_text(whole)


def test_what_is_no_run_of_a_spec_is_no_result(uri: str, results: pd.DataFrame) -> None:
    client = store.open_store(uri, create=False)
    parent = client.create_run(client.get_experiment_by_name("fedbench/longtail").experiment_id)
    client.set_terminated(parent.info.run_id, "FINISHED")
    assert len(load_results(uri, "longtail")) == len(results)


def invoke(uri: str, *options: str) -> Any:
    return CliRunner().invoke(app, ["leaderboard", "--suite", "longtail", "--store", uri, *options])


@pytest.mark.parametrize(
    ("options", "start"),
    [
        (["--format", "csv"], "block,caption,baseline,rank,row"),
        (["--format", "md"], "embedded (data dddddddd)"),
        (["--format", "latex"], "% \\usepackage{booktabs,graphicx}"),
        ([], "embedded (data dddddddd)"),
    ],
)
def test_every_format_goes_to_stdout(uri: str, options: list[str], start: str) -> None:
    done = invoke(uri, *options)
    assert (done.exit_code, done.stdout[: len(start)]) == (0, start)


def test_the_command_line_overrules_the_suite(uri: str) -> None:
    options = ["--metric", "head", "--column", "tail", "--baseline", "fedprox", "--target", "55", "--test", "wilcoxon"]
    done = invoke(uri, "--format", "csv", *options)
    lines = list(csv.DictReader(done.stdout.splitlines()))
    # the third is the row that failed
    assert [line["headline"] for line in lines] == ["head_accuracy"] * 3
    assert [line["baseline"] for line in lines] == ["fedprox"] * 3
    assert [line["status"] for line in lines] == ["finished", "finished", "failed"]
    assert json.loads(lines[0]["shown"]) == ["head_accuracy", "tail_accuracy"]
    assert (lines[0]["target"], lines[0]["test"]) == ("55.0", "Wilcoxon signed-rank test")
    wrong = invoke(uri, "--metric", "heda")
    assert wrong.exit_code == 2 and "did you mean 'head'" in " ".join(wrong.stderr.split())


def test_a_single_domain_can_rank_a_page(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedbench_boards.leaderboard import results as module

    line = module._line

    def with_domain(suite: str, run: Any) -> dict[str, Any]:
        rounds = 5 if run.data.params["seed"] == "0" else 20  # two tables, so that there is an overview
        return {**line(suite, run), "final/domain_accuracy/sketch": 41.5, "rounds": str(rounds)}

    monkeypatch.setattr(module, "_line", with_domain)
    done = invoke(uri, "--metric", "domain_accuracy/sketch", "--format", "html")
    assert done.exit_code == 0, done.exception
    assert 'data-key="domain_accuracy/sketch"' in done.stdout and ">sketch</th>" in done.stdout


@pytest.mark.parametrize("output", ["file", "file/below"])
def test_an_output_that_cannot_be_written_is_one_message(uri: str, tmp_path: Path, output: str) -> None:
    (tmp_path / "file").write_text("kept")
    done = invoke(uri, "--output", str(tmp_path / output))
    assert done.exit_code == 2 and "choose another folder" in " ".join(done.stderr.split())
    assert (tmp_path / "file").read_text() == "kept"


def test_results_are_read_from_a_folder_that_cannot_be_written(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    folder = str(Path(uri.removeprefix("sqlite:///")).parent)
    assert invoke(folder).exit_code == 0
    with pytest.raises(FedbenchError, match="is not writable"):
        store_uri(folder)


def test_output_writes_every_format_and_a_page(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def write_page(path: Path, *arguments: Any) -> None:
        names = ("read", "federations", "command")
        given.update(zip(names, arguments, strict=True))
        path.write_text("<html>", encoding="utf-8")

    monkeypatch.setitem(sys.modules, "fedbench_boards.leaderboard.page", SimpleNamespace(write_page=write_page))
    done = invoke(uri, "--output", str(tmp_path / "out"), "--metric", "head")
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "index.html",
        "leaderboard.csv.gz",
        "leaderboard.md",
        "manifest.json",
        "results.csv.gz",
    ]
    read = given["read"]
    assert (read.suite.name, len(read.results), len(read.board.lines)) == ("longtail", 6, 3)
    assert given["command"] == "fedbench leaderboard --suite longtail --metric head"
    # a run of before is superseded, the six that count have round 0
    assert (len(read.curves), len(given["federations"])) == (6, 6)
    assert invoke(uri, "--format", "html").stdout == "<html>"


def test_own_models_and_data_at_the_server_are_named_under_the_table(uri: str) -> None:
    results = load_results(uri, "longtail")
    is_prox = results["method"] == "fedprox"
    results["server_data"] = ["unlabelled" if prox else "" for prox in is_prox]
    results["final/personal_mean_client_accuracy"] = [80.0 if prox else float("nan") for prox in is_prox]
    (shown,) = text_tables(board_of(leaderboard(results)))
    assert "unlabelled samples at the server are used by fedprox" in shown.notes
    assert OWN_MODELS in shown.notes
    (column,) = [column for column in shown.scores if column.heading == "own models"]
    assert sorted(column.texts) == ["80.0 ± 0.0", "–"]
    (plain,) = text_tables(board_of(leaderboard(load_results(uri, "longtail"))))
    assert OWN_MODELS not in plain.notes and not any("at the server" in note for note in plain.notes)

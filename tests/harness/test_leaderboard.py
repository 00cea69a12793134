"""The leaderboard's arithmetic, worked out by hand, what may stand in one table, and what readers see."""

import csv
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from fedbench import store, tracking
from fedbench.cli.leaderboard import Format, _command
from fedbench.errors import FedbenchError
from fedbench.hookspecs import RoundRecord, RunInfo, RunResult
from fedbench.leaderboard import leaderboard, load_results, render_terminal, to_csv, to_markdown, write
from fedbench.results import _line, scenario_summary
from fedbench.scenarios.scenario import Scenario
from fedbench.spec import RunSpec, Training
from fedbench.suite import load_suite

LONGTAIL = Scenario(imbalance="exponential", partition="dirichlet", participation=0.4)
# seed -> head, tail; accuracy is between them
FEDAVG = {0: 60.0, 1: 62.0, 2: 67.0}
FEDPROX = {0: 61.0, 1: 65.0, 2: 69.0}


def spec(method: str, seed: int, **given: Any) -> RunSpec:
    params = {"fedprox": {"mu": given.pop("mu", 0.1)}} if method == "fedprox" else {}
    training = Training(rounds=given.pop("rounds", 20), lr=given.pop("lr", 0.01))
    return RunSpec(method=method, params=params, seed=seed, scenario=LONGTAIL, training=training, **given)


def track(listener: tracking.Tracking, spec: RunSpec, accuracy: float, **metrics: float) -> None:
    """A finished run with this final accuracy, 1.5 MB up, 0.5 MB down, 9 s of training and 12 s in all."""
    info = RunInfo({}, "d" * 64, f"{spec.backbone:w<64}", 20, 8, 400, 80, 6, 24)
    summary = {"global_accuracy": accuracy, "bytes_up": 1.5e6, "bytes_down": 0.5e6, "train_seconds": 9.0, **metrics}
    listener.run_started(spec, info)
    listener.round_finished(spec, RoundRecord(0, (), {"global_accuracy": accuracy}, 0, 0, 0.0))
    listener.run_finished(spec, info, RunResult((), summary, (0, 1), {"w": np.zeros(2)}, 12.0))


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with a suite of two methods on three seeds, tracked once."""
    uri = store.store_uri(str(tmp_path_factory.mktemp("store")))
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


def made(specs: Sequence[tuple[RunSpec, float]]) -> pd.DataFrame:
    """Results as ``load_results`` would give them, without a store; each run started a second after the one before."""
    lines = []
    for number, (one, accuracy) in enumerate(specs):
        tags = {"fedbench.row": one.row, "fedbench.run_id": one.run_id, "fedbench.commit": "c" * 40}
        tags |= {"fedbench.data_hash": "d" * 64, "fedbench.num_clients": "20"}
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
        console.print(render_terminal(board))
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


def test_mean_and_sample_std_over_seeds(results: pd.DataFrame) -> None:
    board = leaderboard(results).set_index("row")
    fedavg = board.loc["fedavg · clip:embedded"]
    # 60, 62, 67: mean 63, deviations -3, -1, 4, squares 26, over n - 1 = 2: 13
    assert fedavg["global_accuracy_mean"] == pytest.approx(63.0)
    assert fedavg["global_accuracy_std"] == pytest.approx(13**0.5)
    assert (fedavg["tail_accuracy_mean"], fedavg["tail_accuracy_std"]) == pytest.approx((41.0, 1.0))
    assert (fedavg["bytes_up_mean"], fedavg["bytes_down_mean"], fedavg["seconds_mean"]) == (1.5e6, 0.5e6, 12.0)
    assert fedavg["seeds"] == 3


def test_the_difference_is_paired_over_seeds(results: pd.DataFrame) -> None:
    board = leaderboard(results).set_index("row")
    fedprox = board.loc["fedprox · clip:embedded"]
    # 61-60, 65-62, 69-67 = 1, 3, 2: mean 2, sample std 1; unpaired it would be about 5
    assert (fedprox["delta_mean"], fedprox["delta_std"], fedprox["delta_seeds"]) == (2.0, 1.0, 3)
    assert np.isnan(board.loc["fedavg · clip:embedded", "delta_mean"])


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
    assert "5 rounds of 1 local epoch, batch 32" in board["caption"][2]


def test_a_row_with_other_seeds_has_its_own_table_and_pairs_over_common_seeds() -> None:
    runs = [(spec("fedavg", seed), 60.0 + seed) for seed in range(3)]
    board = leaderboard(made([*runs, (spec("fedprox", 1), 66.0), (spec("fedprox", 7), 99.0)]))
    assert board["row"].tolist() == ["fedavg · clip:embedded", "fedprox · clip:embedded"]
    assert board["block"].tolist() == [0, 1]
    assert "seeds 0, 1, 2" in board["caption"][0] and "seeds 1, 7" in board["caption"][1]
    # only seed 1 is common: 66 - 61
    assert (board["delta_mean"][1], board["delta_seeds"][1]) == (5.0, 1)
    assert np.isnan(board["delta_std"][1])


def test_rows_of_one_name_that_differ_in_a_setting_are_not_averaged() -> None:
    board = leaderboard(made([(spec("fedprox", 0, mu=0.1), 60.0), (spec("fedprox", 0, mu=1.0), 70.0)]))
    assert board["row"].tolist() == [
        "fedprox · clip:embedded [fedprox.mu=1.0]",
        "fedprox · clip:embedded [fedprox.mu=0.1]",
    ]
    assert board["seeds"].tolist() == [1, 1]


def test_each_row_meets_the_baseline_on_its_own_backbone() -> None:
    backbones = {"clip:embedded": 60.0, "convnet": 30.0}
    runs = [(spec("fedavg", 0, backbone=name), accuracy) for name, accuracy in backbones.items()]
    runs += [(spec("fedprox", 0, backbone=name), accuracy + 1) for name, accuracy in backbones.items()]
    board = leaderboard(made(runs)).set_index("row")
    assert board.loc["fedprox · convnet", "delta_mean"] == 1.0
    assert board.loc["fedprox · clip:embedded", "delta_mean"] == 1.0
    whole_row = leaderboard(made(runs), baseline="fedavg · clip:embedded").set_index("row")
    assert whole_row.loc["fedprox · convnet", "delta_mean"] == -29.0


def test_the_terminal_table_fits_and_marks_the_best(results: pd.DataFrame) -> None:
    text = shown(leaderboard(results))
    assert max(len(line) for line in text.splitlines()) <= 110
    assert "65.0 ± 4.0" in text and "63.0 ± 3.6" in text and "+2.0 ± 1.0" in text
    assert "…" not in text
    console = Console(width=110, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(render_terminal(leaderboard(results)))
    assert "\x1b[1m65.0 ± 4.0\x1b[0m" in capture.get()
    assert "\x1b[1m63.0 ± 3.6\x1b[0m" not in capture.get()


def test_a_wide_board_still_fits(results: pd.DataFrame) -> None:
    wide = results.assign(method="clip-linear-centralized", row="clip-linear-centralized · clip:embedded")
    wide["final/mid_accuracy"] = wide["final/worst_client_accuracy"] = wide["final/tail_accuracy"]
    board = leaderboard(pd.concat([results, wide.iloc[:3].assign(seed=[0, 1, 2])], ignore_index=True))
    text = shown(board)
    assert "clip-linear-centralized" in text and "…" not in text
    assert max(len(line) for line in text.splitlines()) <= 110


def test_one_seed_has_no_spread(results: pd.DataFrame) -> None:
    text = shown(leaderboard(results[results["seed"] == 0]))
    assert " 61.0 " in text and "+1.0" in text and "61.0 ±" not in text
    assert "1 seed;" in text


def test_markdown_says_under_which_conditions(results: pd.DataFrame) -> None:
    caption, _, *table = to_markdown(leaderboard(results)).partition("\n\nAll rows:")[0].splitlines()
    for fact in (
        "embedded (data dddddddd)",
        "40 % participating",
        "20 clients",
        "20 rounds",
        "seeds 0, 1, 2",
        "commit",
    ):
        assert fact in caption
    assert table == [
        "| method | accuracy | head | tail | Δ fedavg | MB | train s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| fedprox | **65.0 ± 4.0** | 79.0 ± 0.0 | **51.0 ± 1.0** | +2.0 ± 1.0 | 2.00 | 9.0 |",
        "| fedavg | 63.0 ± 3.6 | **80.0 ± 0.0** | 41.0 ± 1.0 | – | 2.00 | 9.0 |",
    ]


def test_csv_has_unrounded_means_and_stds(results: pd.DataFrame, tmp_path: Path) -> None:
    to_csv(leaderboard(results), tmp_path / "board.csv")
    with (tmp_path / "board.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert float(lines[1]["global_accuracy_std"]) == pytest.approx(13**0.5, rel=1e-12)
    assert (lines[1]["bytes_up_mean"], lines[0]["delta_mean"], lines[1]["delta_mean"]) == ("1500000.0", "2.0", "")


def test_a_seed_counts_once_however_often_a_run_was_evaluated() -> None:
    often = [(spec("fedavg", seed), 60.0 + 2 * seed) for seed in (0, 1)]
    seldom = [(one.model_copy(update={"training": one.training.model_copy(update={"eval_every": 5})}), a + 1)
              for one, a in often]  # fmt: skip
    (line,) = leaderboard(made([*often, *seldom])).to_dict("records")
    # the newer ones: 61 and 63, mean 62, deviations 1, 1 over n - 1 = 1: std sqrt 2
    assert (line["seeds"], line["global_accuracy_mean"]) == (2, 62.0)
    assert line["global_accuracy_std"] == pytest.approx(2**0.5)


def test_another_headline_ranks_the_rows_and_is_what_differences_are_taken_of(results: pd.DataFrame) -> None:
    board = leaderboard(results, headline="head_accuracy")
    assert board["row"].tolist() == ["fedavg · clip:embedded", "fedprox · clip:embedded"]
    # head 79 against 80 on every seed
    assert board["delta_mean"].tolist()[1] == pytest.approx(-1.0)
    # a table without the headline is ranked by the overall accuracy, and says so
    board = leaderboard(results, headline="mid_accuracy")
    assert board["row"].tolist() == ["fedprox · clip:embedded", "fedavg · clip:embedded"]
    assert board["caption"].str.contains("ranked by global_accuracy, since not every run has mid_accuracy").all()


def test_two_states_of_changed_code_are_told_apart() -> None:
    lines = made([(spec("fedavg", seed), 60.0) for seed in (0, 1)])
    lines["commit"], lines["code_hash"] = "c" * 40 + "+dirty", ["1" * 64, "2" * 64]
    caption = leaderboard(lines)["caption"].iloc[0]
    assert "ccccccc+dirty (code 11111111), ccccccc+dirty (code 22222222)" in caption


def test_captions_say_when_code_states_mix_and_only_then() -> None:
    lines = made([(spec("fedavg", seed), 60.0) for seed in (0, 1)])
    lines["code_hash"] = ["1" * 64, "2" * 64]
    assert leaderboard(lines)["caption"].iloc[0].endswith("commit ccccccc · several code states")
    lines["code_hash"] = "1" * 64
    assert leaderboard(lines)["caption"].iloc[0].endswith("commit ccccccc")


def test_the_overall_accuracy_can_be_a_column_beside_another_headline(results: pd.DataFrame) -> None:
    board = leaderboard(results, ("global",), headline="head_accuracy")
    shown_first = [name for name in board if name.endswith("_accuracy_mean")]
    assert shown_first == ["head_accuracy_mean", "global_accuracy_mean"]


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
    write(both, leaderboard(both), tmp_path, "")
    text = (tmp_path / "leaderboard.md").read_text("utf-8")
    tables = [part for part in text.split("\n\n") if part.startswith(("| ", "All rows", "- "))]
    assert [part[:5] for part in tables] == ["| met", "All r", "- fed"] * 2
    lists = {tuple(part.strip().splitlines()) for part in tables[2::3]}
    assert ("- fedprox, seeds 0, 1, 2: `fedprox.mu=0.1`", "- fedavg, seeds 0, 1, 2") in lists
    assert ("- fedprox, seed 4: `fedprox.mu=0.1`, `lr=0.5`", "- fedavg, seed 4: `lr=0.01`") in lists
    first = next(part for part in tables if part.startswith("All rows") and "`lr=" in part)
    assert "`backbone=clip:embedded`, `tune=auto`" in first and "`optimizer=sgd`" in first and "`lr=0.01`" in first


def test_write_gives_three_files_and_the_command(results: pd.DataFrame, tmp_path: Path) -> None:
    write(results, leaderboard(results), tmp_path / "new" / "folder", "fedbench leaderboard --suite longtail")
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["leaderboard.csv", "leaderboard.md", "results.csv"]
    assert "Made by `fedbench leaderboard --suite longtail`." in (folder / "leaderboard.md").read_text("utf-8")
    assert len(pd.read_csv(folder / "results.csv")) == 6


def test_nothing_to_show_says_what_to_run_for_shipped_suites_only(uri: str, tmp_path: Path) -> None:
    none = store.store_uri(str(tmp_path / "none"))
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
    ("asked", "shape", "command"),
    [
        ("longtail", Format.terminal, "fedbench leaderboard --suite longtail"),
        ("/home/me/my suite.yaml", Format.csv, "fedbench leaderboard --suite 'my suite.yaml' --format csv"),
        (None, Format.terminal, "fedbench leaderboard"),
    ],
)
def test_the_stored_command_has_no_paths(asked: str | None, shape: Format, command: str) -> None:
    assert _command(asked, shape) == command


@pytest.mark.parametrize("name", ["feature-skew", "leave-one-domain-out"])
def test_a_suite_says_its_headline(name: str) -> None:
    headlines = {
        "feature-skew": "domain_mean_accuracy",
        "leave-one-domain-out": "selected_unseen_domain_accuracy",
    }
    assert load_suite(name).headline == headlines[name]
    assert load_suite("longtail").headline == "global_accuracy"


def test_the_table_of_a_held_out_domain_fits(results: pd.DataFrame) -> None:
    scores = ("selected_unseen_domain", "unseen_domain", "seen_domain", "domain_mean")
    given = {f"final/{name}_accuracy": results["final/global_accuracy"] for name in scores}
    full = results.assign(**given, row=results["row"].where(results["method"] == "fedavg", "fedprox · clip:b (full)"))
    suite = load_suite("leave-one-domain-out")
    text = shown(leaderboard(full, suite.columns, suite.baseline, suite.headline))
    headings = next(line for line in text.splitlines() if "train s" in line)
    assert headings.split("  ")[0].strip() == "row"
    assert [word for word in ("unseen (selected)", " seen", "domains", "Δ fedavg") if word not in headings] == []
    assert max(len(line) for line in text.splitlines()) <= 110 and "…" not in text


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        (Scenario(), "iid, 100 % participating"),
        (Scenario(partition="shards", participation=0.1), "shards(2), 10 % participating"),
        (
            Scenario(partition="domain", holdout_domain="sketch", labels="hidden"),
            "domain(1), without sketch, 100 % participating, labels hidden",
        ),
        (Scenario(imbalance="natural", dropout=0.25), "imbalance natural, iid, 100 % participating, 25 % dropping out"),
        (Scenario(groups="shots", partition_seed=3), "iid, 100 % participating, groups=shots, partition_seed=3"),
    ],
)
def test_a_scenario_is_told_in_a_few_words(scenario: Scenario, words: str) -> None:
    params = {k.removeprefix("scenario."): v for k, v in tracking.flat_params(RunSpec(scenario=scenario)).items()}
    assert scenario_summary({k: v for k, v in params.items() if k in Scenario.model_fields}) == words

"""Failed runs in a leaderboard: never a number, always a reason, in every format, and gone once their seed finishes."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedbench.cli.app import app
from fedbench.core.errors import FedbenchError
from fedbench.core.records import RoundRecord, RunInfo, RunResult
from fedbench.core.spec import RunSpec, Training
from fedbench.tracking import store
from fedbench.tracking.listener import Tracking
from fedbench.tracking.recording import end_run
from fedbench.tracking.schema import store_uri
from fedbench_boards.leaderboard.failures import of_tables, shortened
from fedbench_boards.leaderboard.formats import render_terminal, to_markdown
from fedbench_boards.leaderboard.latex import to_latex
from fedbench_boards.leaderboard.page import write_page
from fedbench_boards.leaderboard.reading import baseline_named, metric_named
from fedbench_boards.leaderboard.results import load_results, load_runs, reason_of
from tests.leaderboard.frames import board_of, leaderboard, read_of

DIVERGED = "training diverged in round 3: the loss of client 7 is NaN; lower training.lr or clip the gradients of it"
HOSTILE = "<script>alert(1)</script> | [x](javascript:alert(1)) `a` *b* & 50 % #1 {c}_d $e$ ~^\\ \x1b[31m\nend"


def spec(method: str, seed: int, lr: float = 0.01, **given: Any) -> RunSpec:
    return RunSpec(method=method, seed=seed, training=Training(lr=lr, eval_every=given.pop("eval_every", 1)), **given)


class Suite:
    """A store, written to as runs end."""

    def __init__(self, folder: Path) -> None:
        self.uri = store_uri(str(folder))
        self.listener = Tracking(self.uri, "toy")
        self._clock = 0

    def start(self, one: RunSpec, weights: str = "w" * 64, data: str = "d", files: str = "") -> None:
        self.listener.run_started(one, RunInfo({}, data * 64, weights, 20, 8, 400, 80, 6, 24, files_hash=files))
        self.listener.round_finished(one, RoundRecord(0, (), {"global_accuracy": 99.0}, 0, 0, 0.0))

    def finish(self, one: RunSpec, accuracy: float) -> None:
        self.start(one)
        self._date(one)
        info = RunInfo({}, "d" * 64, "w" * 64, 20, 8, 400, 80, 6, 24)
        self.listener.run_finished(one, info, RunResult((), {"global_accuracy": accuracy}, (), {}, 1.0))

    def fail(self, one: RunSpec, reason: str = DIVERGED, *, started: bool = False) -> None:
        if started:
            self.start(one)
        elif one.run_id not in self.listener._open:
            self.listener._opened(one)
        self._date(one)
        self.listener.run_failed(one, reason)

    def _date(self, one: RunSpec) -> None:
        """Runs of a test begin within a millisecond, which is as fine as MLflow's clock is."""
        self._clock += 1
        self.listener._open[one.run_id].began = self._clock

    def board(self, **given: Any) -> pd.DataFrame:
        stored = load_runs(self.uri, "toy")
        return leaderboard(stored.finished, failed=stored.failed, **given)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store's file before any run, which takes seconds to make and none to copy."""
    folder = tmp_path_factory.mktemp("empty")
    store.open_store(store_uri(str(folder)), create=True)
    return folder


@pytest.fixture
def suite(empty: Path, tmp_path: Path) -> Suite:
    return Suite(Path(shutil.copytree(empty, tmp_path / "store")))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """fedavg and fedprox whole on three seeds, fedclip without its second, moon and scaffold without any."""
    made = Suite(tmp_path_factory.mktemp("mixed"))
    for seed, gain in enumerate((1.0, 3.0, 2.0)):
        made.finish(spec("fedavg", seed), 60.0 + seed)
        made.finish(spec("fedprox", seed), 60.0 + seed + gain)
    made.finish(spec("fedclip", 0), 90.0)
    made.fail(spec("fedclip", 1), started=True)
    made.finish(spec("fedclip", 2), 94.0)
    for seed in (0, 1):
        made.fail(spec("moon", seed), started=True)
    made.fail(spec("moon", 2), "out of memory")
    made.fail(spec("scaffold", 0), HOSTILE)
    yield made


@pytest.fixture
def board(mixed: Suite) -> pd.DataFrame:
    return mixed.board()


def terminal(board: pd.DataFrame, width: int = 120) -> str:
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(render_terminal(board_of(board)))
    return capture.get()


def page(board: pd.DataFrame, mixed: Suite, folder: Path) -> str:
    file = folder / "index.html"
    results = load_runs(mixed.uri, "toy").finished
    curves = pd.DataFrame({"mlflow_id": results["mlflow_id"], "round": 1, "global_accuracy": 50.0})
    read = read_of(results, board_of(board), pd.concat([curves, curves.assign(round=2)]))
    write_page(file, read, {}, "fedbench")
    return file.read_text("utf-8")


def statuses(board: pd.DataFrame) -> dict[str, str]:
    return dict(zip(board["label"], board["status"], strict=True))


def test_failed_runs_are_no_results(mixed: Suite) -> None:
    stored = load_runs(mixed.uri, "toy")
    assert set(stored.finished["method"]) == {"fedavg", "fedprox", "fedclip"} and len(stored.finished) == 8
    assert sorted(zip(stored.failed["method"], stored.failed["seed"], strict=True)) == [
        ("fedclip", 1), ("moon", 0), ("moon", 1), ("moon", 2), ("scaffold", 0),
    ]  # fmt: skip
    # the accuracy of round 0 is no result, nor is anything else of a run that failed
    assert not [name for name in stored.failed if name.startswith("final/")]
    assert load_results(mixed.uri, "toy").equals(stored.finished)


def test_rows_that_lost_seeds_stand_last_in_the_table_they_were_meant_for(board: pd.DataFrame) -> None:
    assert board["block"].nunique() == 1
    assert board["label"].tolist() == ["fedprox", "fedavg", "fedclip", "moon", "scaffold"]
    # fedclip's mean of two seeds would be the best of the table
    assert board["rank"].tolist() == [1, 2, pd.NA, pd.NA, pd.NA]
    assert board["seeds"].tolist() == [3, 3, 2, 0, 0]
    assert board["status"].tolist() == ["finished", "finished", "partly failed", "failed", "failed"]
    assert board["failure"].tolist()[:4] == [
        "",
        "",
        f"2 of 3 seeds; seed 1 failed: {DIVERGED}",
        f"seeds 0, 1 failed: {DIVERGED}; seed 2 failed: out of memory",
    ]
    assert "seeds 0-2" in board["caption"].iloc[0] and "20 clients" in board["caption"].iloc[0]


def test_numbers_are_those_of_the_seeds_that_finished(board: pd.DataFrame) -> None:
    line = board.set_index("label").loc["fedclip"]
    # seeds 0 and 2: 90 and 94; the baseline's 60 and 62
    assert line["global_accuracy_mean"] == 92.0
    assert (line["delta_mean"], line["delta_seeds"], line["significance"]) == (31.0, 2, "needs 3 seeds, has 2")
    without = board[board["status"] == "failed"]
    numbers = [name for name in board if name.endswith(("_mean", "_std")) or name in ("p_value", "p_adjusted", "rank")]
    assert without[numbers].isna().all(axis=None)
    assert json.loads(line["runs"]) == {str(seed): spec("fedclip", seed).run_id for seed in (0, 2)}
    (failure,) = json.loads(line["failures"])
    assert (failure["seed"], failure["reason"], failure["run_id"]) == (1, DIVERGED, spec("fedclip", 1).run_id)


def test_other_rows_have_the_numbers_they_would_have_alone(mixed: Suite, board: pd.DataFrame) -> None:
    results = load_results(mixed.uri, "toy")
    alone = leaderboard(results[results["method"] != "fedclip"]).set_index("label")
    beside = board.set_index("label").loc[alone.index]
    told = [name for name in alone if name not in ("caption", "rank", "p_adjusted")]
    pd.testing.assert_frame_equal(beside[told], alone[told], check_dtype=False)
    assert beside["rank"].tolist() == alone["rank"].tolist()


def test_the_terminal_says_failed_shortly_and_keeps_to_its_width(board: pd.DataFrame) -> None:
    text = terminal(board, 100)
    assert max(len(line) for line in text.splitlines()) <= 100
    lines = text.splitlines()
    moon = next(line for line in lines if re.match(r" *– +moon", line))
    assert re.search(r"failed: training diverged", moon) and not re.search(r"\d\d\.\d", moon)
    assert "fedclip †" in text and "† fedclip: 2 of 3 seeds; seed 1 failed: training diverged" in text
    assert "\x1b" not in text and "…" in text


def test_a_reason_fills_no_screen(suite: Suite) -> None:
    suite.finish(spec("fedavg", 0), 60.0)
    suite.finish(spec("fedclip", 0), 60.0)
    suite.fail(spec("fedclip", 1), "x" * 3000)
    suite.fail(spec("moon", 0), "word " * 600)
    text = terminal(suite.board(), 120)
    assert len(text) < 2500 and text.count("…") == 2
    assert "x" * 3000 in to_markdown(board_of(suite.board())) and "x" * 3000 in to_latex(board_of(suite.board()))


def test_the_best_of_two_seeds_is_not_set_bold_among_rows_of_three(board: pd.DataFrame) -> None:
    lines = to_markdown(board_of(board)).splitlines()
    assert [line.split(" | ")[1:3] for line in lines if re.match(r"\| \S+ \| (fed|moon)", line)] == [
        ["fedprox", "**63.0 ± 1.7**"],
        ["fedavg", "61.0 ± 1.0"],
        ["fedclip †", "92.0 ± 2.8"],
        ["moon", "–"],
    ]


def test_markdown_has_every_reason_in_full_in_its_cell(board: pd.DataFrame) -> None:
    text = to_markdown(board_of(board))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert next(row for row in rows if "moon" in row).endswith(f"| failed: {DIVERGED}; out of memory |")
    hostile = next(row for row in rows if "scaffold" in row)
    assert "&lt;script>" in hostile and "](java" not in hostile and "\\`a\\` \\*b\\*" in hostile
    assert f"† fedclip: 2 of 3 seeds; seed 1 failed: {DIVERGED}" in text
    assert re.search(r"^- moon, seeds 0-2.*; failed$", text, re.M)


def test_latex_has_reasons_below_the_table_and_escapes_them(board: pd.DataFrame) -> None:
    text = to_latex(board_of(board))
    assert re.search(r"^-- & moon & -- .* & failed \\\\$", text, re.M)
    assert r"92.0 $\pm$ 2.8" in text and r"fedclip\dag{} &" in text
    assert rf"\dag{{}} fedclip: 2 of 3 seeds; seed 1 failed: {DIVERGED}" in text
    assert r"scaffold: seed 0 failed: $<$script$>$alert(1)" in text
    assert r"\& 50 \% \#1 \{c\}\_d \$e\$ \textasciitilde{}\textasciicircum{}\textbackslash{}" in text


def test_the_page_tells_failed_rows_and_escapes_their_reasons(
    mixed: Suite, board: pd.DataFrame, tmp_path: Path
) -> None:
    html = page(board, mixed, tmp_path)
    assert html.count("<script>") == 1 and "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    body = html.split('data-search="moon')[1].split("</tbody>")[0]
    assert 'class="failed">failed: training diverged' in body
    main = body.split('class="more"')[0]
    assert set(re.findall(r'data-value="([^"]*)"', main)) == {"moon", ""}
    assert f"seeds 0, 1 failed: {DIVERGED}; seed 2 failed: out of memory" in body
    assert spec("moon", 2).run_id in body
    assert f"† fedclip: 2 of 3 seeds; seed 1 failed: {DIVERGED}." in html and "<dd>5</dd>" in html
    # legends and charts are of rows with numbers
    assert html.count('<li data-series="') == 3
    bold = re.findall(r'data-value="([\d.]+)"[^>]*><b>', html)
    assert "92.0" not in bold and "63.0" in bold


def test_csv_gains_columns_at_its_end_only(mixed: Suite, board: pd.DataFrame) -> None:
    assert board.columns[:4].tolist() == ["block", "caption", "baseline", "rank"]
    text = board.to_csv(index=False).splitlines()[1:]
    assert re.match(r'0,".*",fedavg,1,fedprox', text[0]) and re.match(r'0,".*",fedavg,,moon', text[3])
    done = CliRunner().invoke(app, ["leaderboard", "--suite", "toy", "--store", mixed.uri, "--format", "csv"])
    assert done.exit_code == 0 and "out of memory" in done.stdout


@pytest.mark.parametrize("shape", ["table", "csv", "md", "latex", "html"])
def test_a_suite_in_which_everything_failed_is_still_shown(suite: Suite, shape: str) -> None:
    suite.fail(spec("fedavg", 0), "no <data> here")
    suite.fail(spec("moon", 0), "no")
    with pytest.raises(FedbenchError, match=r"unfinished runs \(2\)"):
        load_results(suite.uri, "toy")
    call = ["leaderboard", "--suite", "toy", "--store", suite.uri]
    done = CliRunner().invoke(app, [*call, "--format", shape])
    assert done.exit_code == 0, done.output
    said = {"html": "no &lt;data&gt; here", "md": "no &lt;data> here", "latex": "no $<$data$>$ here"}
    assert said.get(shape, "no <data> here") in done.stdout and "moon" in done.stdout
    text = " ".join(done.stdout.partition("<script>")[0].split())
    assert "an unknown number of clients" in text and not re.search(r"\bnan\b", text.lower())
    asked = CliRunner().invoke(app, [*call, "--metric", "tail"])
    assert asked.exit_code == 2 and "no run has finished" in " ".join(asked.stderr.split())


def test_a_row_whose_seed_finished_later_has_not_failed(suite: Suite) -> None:
    suite.fail(spec("fedavg", 0))
    suite.fail(spec("fedprox", 0), started=True)
    suite.finish(spec("fedavg", 0), 60.0)
    # another way to evaluate is the same row and seed
    suite.finish(spec("fedprox", 0, eval_every=5), 61.0)
    board = suite.board()
    assert statuses(board) == {"fedprox": "finished", "fedavg": "finished"} and set(board["failure"]) == {""}
    assert "†" not in terminal(board) and "status" not in to_markdown(board_of(board))


def test_a_failure_after_the_seed_finished_is_told_beside_its_number(suite: Suite) -> None:
    suite.finish(spec("fedavg", 0), 60.0)
    suite.fail(spec("fedavg", 0), "killed")
    (line,) = suite.board().to_dict("records")
    assert (line["status"], line["global_accuracy_mean"], line["rank"]) == ("finished", 60.0, 1)
    assert line["failure"] == "seed 0 finished and failed when run again: killed"
    assert "† fedavg: seed 0 finished and failed when run again: killed" in terminal(suite.board())


def test_of_several_failures_of_a_seed_the_newest_counts(suite: Suite) -> None:
    suite.finish(spec("fedavg", 0), 60.0)
    for reason in ("first", "second", "third"):
        suite.fail(spec("moon", 0), reason, started=reason == "second")
    assert suite.board().set_index("label").loc["moon", "failure"] == "seed 0 failed: third"


def test_what_was_interrupted_has_not_failed(suite: Suite) -> None:
    suite.finish(spec("fedavg", 0), 60.0)
    suite.start(spec("moon", 0))  # left running by a process that was killed
    suite.start(spec("fedclip", 0))
    left = [suite.listener._open[spec(method, 0).run_id] for method in ("moon", "fedclip")]
    for run in left:
        suite.listener._send(run)
    end_run(suite.listener._client, left[1].id, "KILLED")
    assert suite.board()["label"].tolist() == ["fedavg"]


def test_a_failed_run_of_other_settings_is_a_row_of_its_own_and_says_which(suite: Suite) -> None:
    suite.finish(spec("fedavg", 0), 60.0)
    suite.fail(spec("fedavg", 0, lr=50.0))
    board = suite.board()
    assert statuses(board) == {"fedavg": "finished", "fedavg [lr=50.0]": "failed"}


def test_a_failed_baseline_is_named_as_the_reason_there_is_none(suite: Suite) -> None:
    suite.fail(spec("fedavg", 0))
    suite.finish(spec("fedprox", 0), 61.0)
    board = suite.board().set_index("label")
    assert board.loc["fedprox", ["baseline_note", "significance"]].tolist() == ["fedavg failed", "no baseline"]
    assert "no baseline: fedavg failed" in terminal(board.reset_index())
    stored = load_runs(suite.uri, "toy")
    assert baseline_named(stored.finished, "fedavg", stored.failed) == "fedavg"
    with pytest.raises(FedbenchError, match="unknown baseline"):
        baseline_named(stored.finished, "fedavg")
    with pytest.raises(FedbenchError, match="no run has finished"):
        metric_named(stored.finished.iloc[:0].drop(columns=["final/global_accuracy", "final/seconds"]), "tail")


def test_rows_that_all_lost_the_same_seed_are_ranked_among_themselves(suite: Suite) -> None:
    for method, accuracy in (("fedavg", 60.0), ("fedprox", 61.0)):
        suite.finish(spec(method, 0), accuracy)
        suite.fail(spec(method, 1), "disk full")
    board = suite.board()
    assert board[["label", "rank"]].to_numpy().tolist() == [["fedprox", 1], ["fedavg", 2]]
    assert set(board["failure"]) == {"1 of 2 seeds; seed 1 failed: disk full"}


def test_the_tables_of_some_runs_hold_what_is_comparable_to_them(suite: Suite) -> None:
    suite.finish(spec("fedavg", 0), 60.0)
    suite.finish(spec("fedavg", 0, eval_every=5), 60.0)  # of the same row and seed, so the one before is superseded
    suite.fail(spec("moon", 0))  # before it read its data
    other = spec("fedprox", 0).model_copy(update={"training": Training(rounds=7)})
    suite.finish(other, 70.0)
    stored = load_runs(suite.uri, "toy")

    def labels(*runs: RunSpec) -> set[str]:
        finished, failed = of_tables(stored.finished, stored.failed, [one.run_id for one in runs])
        return set(leaderboard(finished, failed=failed)["label"])

    assert labels(spec("moon", 0)) == labels(spec("fedavg", 0)) == {"fedavg", "moon"}
    assert labels(other) == {"fedprox"}
    assert labels(other, spec("moon", 0)) == {"fedavg", "moon", "fedprox"}


def test_a_seed_that_no_other_row_has_costs_no_rank(suite: Suite) -> None:
    suite.finish(spec("fedavg", 0), 60.0)
    suite.finish(spec("fedprox", 0), 61.0)
    suite.fail(spec("fedprox", 5), "disk full")
    board = suite.board().set_index("label")
    assert board.loc["fedprox", ["rank", "failure"]].tolist() == [1, "1 of 2 seeds; seed 5 failed: disk full"]
    suite.finish(spec("fedavg", 5), 60.0)
    board = suite.board()
    assert board["label"].tolist() == ["fedavg", "fedprox"] and board["rank"].tolist() == [1, pd.NA]


def test_a_failure_of_other_code_says_so(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        suite.listener._codes, "of", lambda *_: SimpleNamespace(hash="a" * 64, harness="b" * 64, methods=())
    )
    suite.fail(spec("moon", 0), "old bug")
    monkeypatch.undo()
    suite.fail(spec("fedclip", 0), "new bug")
    suite.finish(spec("fedavg", 0), 60.0)
    told = suite.board().set_index("label")["failure"].to_dict()
    assert told["moon"] == "seed 0 failed: old bug (other code, aaaaaaaa)"
    assert told["fedclip"] == "seed 0 failed: new bug"


def test_a_reason_is_one_printable_line() -> None:
    assert reason_of("a\n\tb\x1b[2Jc\x07 ") == "a b [2Jc"
    assert reason_of(" \n") == "no reason was recorded"
    assert shortened("one two three", 9) == "one two …" and shortened("x" * 20, 10) == "x" * 9 + "…"
    assert shortened("short", 5) == "short"


def test_a_run_that_failed_before_its_data_were_read_is_of_the_table_of_its_files(suite: Suite) -> None:
    suite.start(spec("fedavg", 0), files="f" * 64)
    suite.fail(spec("fedavg", 0))
    suite.start(spec("fedprox", 0), data="e", files="f" * 64)
    suite.fail(spec("fedprox", 0))
    suite.fail(spec("fedprox", 0))
    suite.fail(spec("moon", 0))
    board = suite.board()
    assert set(board["block"]) == {0} and set(board["label"]) == {"fedavg", "fedprox", "moon"}
    # at which size it would have read them, nobody knows
    assert board["caption"].iloc[0].startswith("embedded (data dddddddd) · ")

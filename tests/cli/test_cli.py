"""`fedbench run` through `main`: exit codes, messages, dry runs, progress, Ctrl-C, and what is read back afterwards."""

from __future__ import annotations

import csv
import io
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from fedbench.cli.app import main
from fedbench.core.method.hooks import hookimpl, plugin_manager, relay
from fedbench.core.records import RoundRecord, RunInfo, RunResult
from fedbench.core.spec import RunSpec, Training
from fedbench.runs.engines.events import Event, RoundFinished, RunFailed, RunFinished, RunStarted, notify
from fedbench.workflow import execution
from fedbench.workflow.console import OutputLost
from fedbench.workflow.screens import LiveProgress, PlainProgress, Progress, Terminal
from fedbench.workflow.selection import Selection, command_line
from fedbench_boards.leaderboard.own_models import UNTRAINED_NOTE


def test_other_exceptions_keep_their_traceback(fedbench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(execution, "carry_out", broken)
    monkeypatch.setattr(sys, "argv", ["fedbench", "run", "--method", "fedavg"])
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main()


@pytest.mark.usefixtures("tiny")
def test_dry_run_shows_traffic_and_makes_no_store(fedbench, tmp_path: Path) -> None:
    ended = fedbench(
        *("run", "--method", "fedavg", "--set", "backbone=convnet", "--scenario", "iid", "--seed", "0", "--seed", "1"),
        *("--set", "rounds=3", "--set", "clients=4", "--dry-run", "--store", "store", "--cache-dir", "cache"),
    )
    assert ended.code == 0, ended.err
    row = next(line for line in ended.out.splitlines() if line.startswith("fedavg"))
    cells = [part.strip() for part in row.split("  ") if part.strip()]
    # convnet with 4 classes; 4 clients of 4, 3 rounds, the model down and up
    parameters = int(cells[4].replace(",", ""))
    assert cells[:4] == ["fedavg · convnet", "0 1", "3", "4 of 4"]
    assert float(cells[5]) == pytest.approx(2 * 4 * parameters / 1e6, abs=0.005)
    assert float(cells[6]) == pytest.approx(3 * 4 * 2 * 4 * parameters / 1e6, rel=0.01)
    assert not (tmp_path / "store").exists()


@dataclass
class FakeTracking:
    """Keeps what the command line told it."""

    command = ""
    uri: str
    suite: str
    invocation: object = None
    claims: object = None
    tell: object = None
    patience: float = 0.0
    rerun: bool = False
    codes: object = None
    interrupted: list[bool] = field(default_factory=list)

    def end_dead_commands(self) -> None:
        """There are none."""

    def interrupt(self) -> None:
        """The runs on their way are marked."""
        self.interrupted.append(True)


def spec_named(method: str, seed: int = 0, rounds: int = 20) -> RunSpec:
    return RunSpec(method=method, seed=seed, training=Training(rounds=rounds))


def info(parameters: int = 10) -> RunInfo:
    return RunInfo({}, "", "", 4, 2, 100, 50, parameters, 4 * parameters)


def record(number: int, accuracy: float | None = 50.0) -> RoundRecord:
    return RoundRecord(number, (0, 1), {} if accuracy is None else {"global_accuracy": accuracy}, 10**6, 2 * 10**6, 0.5)


def result(accuracy: float) -> RunResult:
    return RunResult((), {"global_accuracy": accuracy}, (), {}, 61.0)


def life(spec: RunSpec) -> list[Event]:
    """All events of a run."""
    rounds = [RoundFinished(spec, record(r)) for r in range(spec.training.rounds + 1)]
    return [RunStarted(spec, info()), *rounds, RunFinished(spec, info(), result(66.12))]


def shown_by(view: type[Progress], specs: Sequence[RunSpec], events: Sequence[Event], width: int = 80) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=view is LiveProgress, color_system=None)
    manager = plugin_manager()
    progress = view("tests", specs, console)
    manager.register(progress)
    with progress:
        for event in events:
            notify(relay(manager), event)
    return stream.getvalue()


def test_plain_progress_is_a_line_at_start_and_end_and_one_a_tenth_of_the_rounds() -> None:
    specs = [spec_named("fedavg", 0), spec_named("fedprox", 1)]
    first, second = life(specs[0]), life(specs[1])
    # two workers: the runs interleave
    interleaved = [event for pair in zip(first, second, strict=True) for event in pair]
    lines = shown_by(PlainProgress, specs, interleaved).splitlines()
    mine = [line for line in lines if "fedprox" in line]
    assert mine[0] == "start   fedprox · clip:embedded  seed 1"
    assert mine[1] == "round   fedprox · clip:embedded  seed 1   2/20  50.0 %  0.5 s  ↑3.00 ↓6.00 MB"
    assert mine[-1] == "done    fedprox · clip:embedded  seed 1  66.1 %    1:01  (2/2)"
    assert len(mine) == 2 + 9
    assert len(lines) == 2 * len(mine)


def test_plain_progress_says_why_a_run_failed_brackets_included() -> None:
    spec = spec_named("fedavg")
    events: list[Event] = [RunStarted(spec, info()), RunFailed(spec, "ValueError: [bold]no[/bold]")]
    lines = shown_by(PlainProgress, [spec], events).splitlines()
    assert lines[-1] == "failed  fedavg · clip:embedded  seed 0  ValueError: [bold]no[/bold]  (1/1)"


def test_live_view_shows_running_runs_with_what_is_left_and_goes_away() -> None:
    specs = [spec_named("fedavg", 0), spec_named("fedavg", 1)]
    view = LiveProgress("tests", specs, Console(width=80))
    stream = io.StringIO()
    console = Console(file=stream, width=80)
    console.print(view.view)
    assert "0/2 runs" in stream.getvalue()
    assert "starting" in stream.getvalue()
    view.run_started(specs[0], info())
    view.round_finished(specs[0], record(0, None))
    view.round_finished(specs[0], record(10))
    console.print(view.view)
    shown = stream.getvalue().splitlines()
    assert "10/20 50.0 %" in shown[-2]
    assert "left" in shown[-1]
    assert max(map(len, shown)) <= 80
    written = shown_by(LiveProgress, specs, life(specs[0]))
    assert "done    fedavg · clip:embedded  seed 0  66.1 %    1:01" in written


def test_remaining_time_follows_the_share_of_rounds_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("fedbench.workflow.screens.time.monotonic", lambda: now[0])
    specs = [spec_named("fedavg", seed) for seed in range(2)]
    progress = PlainProgress("tests", specs, Console(file=io.StringIO()))
    progress.run_started(specs[0], info())
    assert progress.remaining() is None
    now[0] = 30.0
    progress.round_finished(specs[0], record(10))
    # 10 of 40 rounds took 30 s
    assert progress.remaining() == pytest.approx(90.0)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[FakeTracking]]:
    """Makes `fedbench run` one without data, training or store: ``events`` in place of the engine's."""
    made: list[FakeTracking] = []

    def tracking(*arguments: object, **options: object) -> FakeTracking:
        made.append(FakeTracking(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    def planned(_: object, specs: object, *__: object, **___: object) -> object:
        return SimpleNamespace(rows=[SimpleNamespace(info=info(), specs=specs)], failed=[], absent=[])

    def fake(events: Callable[[Sequence[RunSpec]], Iterator[Event]]) -> list[FakeTracking]:
        monkeypatch.setattr(execution.plan, "plan", planned)
        monkeypatch.setattr(execution, "store_uri", lambda store: f"sqlite:///{Path.cwd()}/store.db")
        monkeypatch.setattr(execution, "stored_runs", lambda *_: {})
        monkeypatch.setattr(execution, "Tracking", tracking)
        monkeypatch.setattr("fedbench.cli.commands.run.show_leaderboard", lambda *_: print("the leaderboard"))
        monkeypatch.setattr(execution, "execute", lambda specs, *_, **__: events(specs))
        return made

    return fake


def test_ctrl_c_stops_workers_marks_runs_and_says_how_to_resume(fedbench, faked) -> None:
    closed = []

    def events(specs: Sequence[RunSpec]) -> Iterator[Event]:
        try:
            yield from life(specs[0])
            yield RunStarted(specs[1], info())
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    made = faked(events)
    ended = fedbench("run", "--method", "fedavg", "--seed", "0", "--seed", "1", "--seed", "2", "--jobs", "2")
    assert ended.code == 130
    expected = "interrupted: 1 of 3 runs are finished and stored; the same command resumes with the rest.\n"
    assert ended.err == expected
    assert made[0].interrupted == [True]
    assert closed == [True]


def test_ctrl_c_while_an_event_is_tracked_waits_until_it_is_stored(
    fedbench, faked, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = []

    class Interrupted(FakeTracking):
        @hookimpl
        def run_finished(self, spec: RunSpec) -> None:
            signal.raise_signal(signal.SIGINT)
            stored.append(spec.seed)

    faked(lambda specs: (event for spec in specs for event in life(spec)))
    monkeypatch.setattr(execution, "Tracking", Interrupted)
    ended = fedbench("run", "--method", "fedavg", "--seed", "0", "--seed", "1")
    assert ended.code == 130
    assert stored == [0]
    assert "interrupted: 1 of 2 runs" in ended.err


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as at a terminal: a process started in the background of a script inherits that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_web_interface_quietly(fedbench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = tmp_path / "started"
    serve = f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(60)"
    monkeypatch.setattr("fedbench.tracking.store.ui_command", lambda _: [sys.executable, "-c", serve])

    def press_ctrl_c() -> None:
        while not started.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press_ctrl_c, daemon=True).start()
    began = time.monotonic()
    ended = fedbench("ui", "--port", "5001")
    assert ended.code == 0
    assert "http://127.0.0.1:5001" in ended.out
    assert ended.err == ""
    assert time.monotonic() - began < 30


def test_ctrl_c_elsewhere_exits_130_without_a_traceback(fedbench, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(execution.plan, "requested", interrupted)
    ended = fedbench("run", "--method", "fedavg")
    assert ended.code == 130
    assert "Traceback" not in ended.err


def test_a_failed_run_exits_1_and_leaves_its_traceback_beside_the_store(fedbench, faked, tmp_path: Path) -> None:
    def events(specs: Sequence[RunSpec]) -> Iterator[Event]:
        yield RunFailed(specs[0], "ValueError: broken", "Traceback of the worker")
        yield from life(specs[1])

    faked(events)
    ended = fedbench("run", "--method", "fedavg", "--seed", "0", "--seed", "1", "--jobs", "1")
    assert ended.code == 1
    assert "failed: fedavg · clip:embedded, seed 0: ValueError: broken\n" in ended.err
    log = tmp_path / "failures.log"
    assert f"tracebacks are at the end of {log}." in ended.err
    first = log.read_text()
    assert "\nfedavg · clip:embedded, seed 0, run " in first and "\nTraceback of the worker\n" in first
    # the next command's stand behind them
    assert fedbench("run", "--method", "fedprox", "--seed", "0", "--seed", "1", "--jobs", "1").code == 1
    second = log.read_text().removeprefix(first)
    assert len(second) < len(log.read_text()) and "\nfedprox · clip:embedded, seed 0, run " in second
    headings = [line for line in (first + second).splitlines() if line.startswith("==== ")]
    year = f"==== {time.strftime('%Y')}-"
    assert all(line.startswith(year) for line in headings)
    assert [line.partition("  ")[2] for line in headings] == [
        "fedbench run --method fedavg --seed 0 --seed 1",
        "fedbench run --method fedprox --seed 0 --seed 1",
    ]


def test_tracebacks_of_runs_that_failed_before_ctrl_c_are_written(fedbench, faked, tmp_path: Path) -> None:
    def events(specs: Sequence[RunSpec]) -> Iterator[Event]:
        yield RunFailed(specs[0], "ValueError: broken", "Traceback of \ud800 the worker")
        raise KeyboardInterrupt

    faked(events)
    ended = fedbench("run", "--method", "fedavg", "--seed", "0", "--seed", "1", "--jobs", "1")
    assert ended.code == 130
    assert "seed 0: ValueError: broken\n" in ended.err and ended.err.splitlines()[-1].startswith("interrupted: 0 of 2 ")
    assert "Traceback of \\ud800 the worker" in (tmp_path / "failures.log").read_text()


@pytest.mark.parametrize("lost", ["as the run fails", "in the tables"])
def test_tracebacks_of_runs_that_failed_before_stdout_was_lost_are_written(
    fedbench, faked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: str
) -> None:
    def lose(*_: object) -> None:
        raise OutputLost("stdout can't be written: Broken pipe.")

    def events(specs: Sequence[RunSpec]) -> Iterator[Event]:
        yield RunFailed(specs[0], "ValueError: broken", "Traceback of the worker")

    faked(events)
    if lost == "in the tables":
        monkeypatch.setattr("fedbench.cli.commands.run.show_leaderboard", lose)
    else:
        monkeypatch.setattr(PlainProgress, "settled", lose)
    with pytest.raises(OutputLost) as told:
        fedbench("run", "--method", "fedavg", "--seed", "0", "--jobs", "1")
    assert "Traceback of the worker" in (tmp_path / "failures.log").read_text()
    assert told.value.is_resumable


def test_finished_runs_are_skipped_unless_rerun_is_given(fedbench, faked, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def events(specs: Sequence[RunSpec]) -> Iterator[Event]:
        asked.append([spec.seed for spec in specs])
        yield from life(specs[0])

    faked(events)
    arguments = ("run", "--method", "fedavg", "--seed", "0", "--seed", "1")
    _, specs = execution.plan.requested(Selection(methods=("fedavg",), seeds=(0, 1)), Terminal())
    monkeypatch.setattr(execution, "stored_runs", lambda *_: {specs[0].run_id: ()})
    ended = fedbench(*arguments)
    assert "1 of 2 runs are in the store already and are skipped; --rerun repeats them." in ended.out
    fedbench(*arguments, "--rerun")
    assert asked == [[1], [0, 1]]
    monkeypatch.setattr(execution, "stored_runs", lambda *_: {spec.run_id: () for spec in specs})
    assert fedbench(*arguments).code == 0
    assert len(asked) == 2


TABLED = '''
from dataclasses import dataclass
from pathlib import Path

from fedbench.toolkit.fedavg import average
from fedbench.core.method.hooks import hookimpl


@dataclass(frozen=True, kw_only=True)
class Params:
    """None."""


class Tabled:
    name, citation, Params, recipe = "tabled", "nobody", Params, {}

    def __init__(self, params):
        self.scale = float((Path(__file__).parent / "table.txt").read_text())

    @hookimpl
    def aggregate(self, task):
        """The mean, scaled."""
        return {name: self.scale * tensor for name, tensor in average(task).items()}
'''


@pytest.mark.usefixtures("tiny")
def test_only_the_rows_whose_code_changed_run_again_and_it_is_said_why(fedbench, tmp_path: Path) -> None:
    table, plugin = tmp_path / "table.txt", tmp_path / "tabled.py"
    table.write_text("1.0")
    plugin.write_text(TABLED)
    arguments = (
        *("run", "--method", "fedavg", "--method", "tabled", "--plugin", "tabled.py", "--set", "backbone=convnet"),
        *("--scenario", "iid", "--engine", "in-process", "--set", "rounds=1", "--set", "clients=2"),
        *("--cache-dir", "cache", "--store", "store"),
    )
    first = fedbench(*arguments, "--seed", "0")
    assert first.code == 0, first.err
    assert "in the store" not in first.out and "fedbench ui --store store" in first.out
    assert "done    fedavg · convnet  seed 0" in first.out
    again = fedbench(*arguments, "--seed", "0")
    assert "2 of 2 runs are in the store already" in again.out and "start " not in again.out
    assert "fedavg" in fedbench("leaderboard", "--suite", "adhoc", "--store", "store", "--format", "md").out
    table.write_text("0.5")
    planned = fedbench(*arguments, "--seed", "0", "--seed", "1", "--dry-run")
    assert [line for line in planned.out.splitlines() if "in the store" in line] == [
        "1 of 4 runs are in the store already and are skipped; --rerun repeats them.",
        "1 of 2 in the store: fedavg · convnet",
        "0 of 2 in the store, 1 again (plugin file tabled.py changed): tabled · convnet",
    ]
    # a seed of the new version is no seed of the old one's row
    again = fedbench(*arguments, "--seed", "1")
    assert again.code == 0 and "in the store" not in again.out
    results = fedbench("leaderboard", "--suite", "adhoc", "--store", "store", "--format", "csv").out
    rows = {line["label"]: line["seed_list"] for line in csv.DictReader(io.StringIO(results))}
    assert rows.pop("fedavg") == "0, 1"
    assert sorted(rows.values()) == ["0", "1"] and all(label.startswith("tabled [tabled.code=") for label in rows)
    assert "plugin tabled.py (" in results


ALONE = '''
"""Every client trains alone."""
from typing import ClassVar
from fedbench.core.method.hooks import hookimpl
from fedbench.core.method.base import NoParams

class Alone:
    name: ClassVar[str] = "alone"
    citation: ClassVar[str] = "Nobody, A baseline that shares nothing, 2024"
    Params: ClassVar[type] = NoParams
    recipe: ClassVar[dict] = {}

    def __init__(self, params): pass

    @hookimpl
    def private(self, model, spec): return [*model.weights, *model.buffers]
'''


@pytest.mark.usefixtures("tiny")
def test_after_a_run_its_own_tables_are_shown_and_the_hint_reads_them_as_the_suite_file_does(
    fedbench, tmp_path: Path
) -> None:
    (tmp_path / "my suites").mkdir()
    file = tmp_path / "my suites" / "own.yaml"
    file.write_text(
        "name: mine\nbackbone: clip:embedded\nscenario: {preset: iid, clients: 2}\nbaseline: alone\nseeds: [0]\n"
        "training: {rounds: 1}\ncolumns: [worst_domain]\nrows: [{method: fedavg}, {method: alone}]\n"
    )
    (tmp_path / "alone.py").write_text(ALONE)
    common = ("--plugin", "alone.py", "--store", "store", "--cache-dir", "cache", "--engine", "in-process")
    first = fedbench("run", "--suite", "my suites/own.yaml", *common)
    assert first.code == 0, first.err
    # it trains, though nothing of the global model is sent
    assert re.search(r"^–  alone ‡", first.out, re.M) and "own models" in first.out and UNTRAINED_NOTE in first.out
    hint = next(line for line in first.out.splitlines() if line.startswith("as files"))
    assert (
        hint
        == "as files     fedbench leaderboard --suite 'my suites/own.yaml' --store store --output leaderboards/mine"
    )
    assert "all tables" not in first.out
    hinted = fedbench(*shlex.split(hint)[3:])
    assert hinted.code == 0, hinted.err
    assert "Δ alone" in (tmp_path / "leaderboards" / "mine" / "leaderboard.md").read_text("utf-8")
    for page in ("index.html", "leaderboard.md"):
        assert "alone ‡" in (tmp_path / "leaderboards" / "mine" / page).read_text("utf-8")
    # other conditions are another table, and the first one is not repeated
    again = fedbench("run", "--suite", "my suites/own.yaml", "--set", "rounds=2", "--method", "fedavg", *common)
    assert again.code == 0, again.err
    assert "2 rounds of" in again.out and "1 round of" not in again.out
    everything = next(line for line in again.out.splitlines() if line.startswith("all tables"))
    shown = fedbench(*shlex.split(everything)[3:]).out
    assert "2 rounds of" in shown and "1 round of" in shown
    # what is comparable stands beside a run, also one that the store had already
    skipped = fedbench("run", "--suite", "my suites/own.yaml", "--method", "fedavg", *common)
    assert "1 of 1 runs are in the store already" in skipped.out
    assert "1 round of" in skipped.out and "alone ‡" in skipped.out and "2 rounds of" not in skipped.out


def test_a_hint_names_files_where_they_are_and_a_record_by_their_names(tmp_path: Path) -> None:
    selection = Selection(suite="my suites/own.yaml", plugin_files=(tmp_path / "alone.py",))
    assert command_line("run", selection) == "fedbench run --suite own.yaml --plugin alone.py"
    hint = command_line("run", selection, paths=True)
    assert hint == f"fedbench run --suite 'my suites/own.yaml' --plugin {tmp_path}/alone.py"

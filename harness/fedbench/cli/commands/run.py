"""``fedbench run``: the options of a run, and what is said once its runs have ended. `fedbench.workflow` runs them."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlparse

import typer

from fedbench.cli.options import (
    CACHE_DIR,
    DATA_DIR,
    MOST,
    Assignments,
    CacheDir,
    DataDir,
    Dataset,
    Devices,
    EngineOption,
    Further,
    Method,
    On,
    Plugins,
    RayAddress,
    RunCpus,
    RunGpus,
    Scale,
    Seed,
    Setting,
    Storage,
    Store,
    SuiteName,
    Workers,
    all_assignments,
    devices_of,
    finite,
    settings_of,
)
from fedbench.core.errors import FedbenchError
from fedbench.core.wording import counted
from fedbench.workflow.console import complain, console, resumable, say

if TYPE_CHECKING:
    from fedbench.core.spec import RunSpec
    from fedbench.runs.prepare import Settings
    from fedbench.suites.suite import Suite
    from fedbench.workflow.execution import Carried
    from fedbench_boards.leaderboard.model import Board
    from fedbench_boards.leaderboard.reading import ReadResults

FINE, SOME_FAILED, INTERRUPTED = 0, 1, 130

_Scenario = Annotated[str | None, typer.Option(metavar="NAME", help="Same as --set scenario=NAME.")]
_Tuned = Annotated[
    str, typer.Option(metavar="STUDY|FILE", help="With the values that fedbench tune found, or those of a CSV file.")
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Show runs, traffic and memory; train nothing.")]
_Rerun = Annotated[bool, typer.Option("--rerun", help="Repeat runs that the store already has.")]
_Executor = Annotated[
    str, typer.Option(metavar="NAME", help="How cohorts are trained: auto, cohort (at once), sequential.")
]
_CheckpointEvery = Annotated[
    int, typer.Option(metavar="ROUNDS", help="Between checkpoints; by default every 30 seconds.", min=0)
]
_RunTimeout = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="A run that takes longer has failed.", min=0.1, max=MOST, callback=finite),
]
_MemoryLimit = Annotated[
    float | None,
    typer.Option(metavar="GB", help="A run that takes more memory has failed.", min=0.1, max=MOST, callback=finite),
]
_StateMemory = Annotated[
    float | None,
    typer.Option(
        metavar="GB",
        help="Of what methods keep with clients so much stays in a run's memory between rounds; the rest is in files.",
        min=0,
        max=MOST,
        callback=finite,
    ),
]
_Retries = Annotated[
    int, typer.Option(metavar="INT", help="Further tries where a process died, or disk or memory were full.", min=0)
]
_Patience = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="For which a store that can't be written is tried again.",
        min=0,
        max=MOST,
        callback=finite,
    ),
]
_FailFast = Annotated[bool, typer.Option("--fail-fast", help="Stop at the first run that fails.")]


def run(
    further: Further = None,
    suite: SuiteName = None,
    method: Method = None,
    on: On = None,
    seed: Seed = None,
    assignment: Assignments = None,
    dataset: Dataset = None,
    scenario: _Scenario = None,
    scale: Scale = "",
    setting: Setting = None,
    tuned: _Tuned = "",
    storage: Storage = None,
    plugin: Plugins = None,
    dry_run: _DryRun = False,
    rerun: _Rerun = False,
    store: Store = None,
    workers: Workers = None,
    devices: Devices = "",
    executor: _Executor = "auto",
    engine: EngineOption = "processes",
    ray_address: RayAddress = "",
    run_cpus: RunCpus = 1.0,
    run_gpus: RunGpus = 0.0,
    checkpoint_every: _CheckpointEvery = 0,
    run_timeout: _RunTimeout = None,
    memory_limit: _MemoryLimit = None,
    state_memory: _StateMemory = None,
    retries: _Retries = 2,
    patience: _Patience = 120.0,
    fail_fast: _FailFast = False,
    data_dir: DataDir = DATA_DIR,
    cache_dir: CacheDir = CACHE_DIR,
) -> None:
    """Run a suite, or single methods, and show the leaderboard.

    Runs already in the store, made by the same code, are skipped, and unfinished ones go on from their last checkpoint:
    the same command resumes what was stopped, however that was.
    """
    from fedbench.runs.engines import ENGINES, warm_up

    if engine != "in-process":
        warm_up()  # the processes of rows and runs import beside this one
    from fedbench.rounds.executors import executor_named
    from fedbench.workflow import plan
    from fedbench.workflow.screens import Terminal
    from fedbench.workflow.selection import Place, Selection
    from fedbench_boards.leaderboard.published import check_published, published_folder

    place = Place(engine, workers, ray_address, run_cpus, run_gpus, memory_limit, devices_of(devices))
    place.check(ENGINES)
    if place.engine == "in-process" and run_timeout is not None:
        raise FedbenchError("a run in this process can't be ended; leave --run-timeout or --engine in-process out.")
    settings = settings_of(data_dir, cache_dir, plugin)
    settings = replace(settings, executor=executor_named(executor), devices=place.devices)
    selection = Selection(
        tuple(method or ()),
        tuple(seed or ()),
        all_assignments(assignment, further, dataset=dataset, scenario=scenario),
        settings.plugin_files,
        scale,
        tuple(setting or ()),
        tuple(on or ()),
        suite=suite,
        tuned=tuned,
    )
    chosen, specs = plan.requested(selection, Terminal(), store, storage)
    check_published(chosen, published_folder(None))
    if dry_run:
        raise typer.Exit(_dry_run(chosen, specs, settings, store, place.engine, is_rerun=rerun))
    from fedbench.runs.engines.engine import Policy
    from fedbench.workflow.execution import Storing, carry_out

    policy = Policy(run_timeout, retries, fail_fast=fail_fast)
    storing = Storing(store, rerun, patience, checkpoint_every, state_memory)
    with resumable():
        outcome = carry_out(selection, chosen, specs, settings, place, policy, storing, Terminal())
        code = conclude(outcome, chosen, suite, store, is_rerun=rerun)
    raise typer.Exit(code)


def _dry_run(
    suite: Suite, specs: list[RunSpec], settings: Settings, store: str | None, engine: str, *, is_rerun: bool
) -> int:
    """Show what the runs cost and which are stored; the exit code."""
    from fedbench.cli import dry_run
    from fedbench.workflow import plan
    from fedbench.workflow.screens import Terminal

    found = plan.plan(suite, specs, settings, Terminal(), dry=True, in_process=engine == "in-process")
    # imports MLflow, which no wrong input should wait for
    from fedbench.workflow.execution import show_stored

    dry_run.show(suite, found, settings)
    show_stored(store, suite, found.rows, settings.plugin_files, Terminal(), is_rerun=is_rerun)
    return SOME_FAILED if found.failed else FINE


def conclude(outcome: Carried, suite: Suite, given: str | None, store: str | None, *, is_rerun: bool) -> int:
    """Show the leaderboard, or why there is none yet, and the failures; the exit code.

    ``given`` are the suite's name or file and ``store`` the folder or URI on the command line.
    """
    from fedbench.suites.suite import asked_for
    from fedbench.workflow.execution import report

    uri = outcome.uri
    if outcome.stopped is not None:
        report(outcome.failures, uri, outcome.recorded)
        return _stopped(outcome, outcome.stopped, is_rerun=is_rerun)
    try:
        if outcome.skipped or outcome.done or outcome.failures:
            asked = asked_for(suite.name, outcome.specs)
            has_others = show_leaderboard(suite, uri, outcome.specs, outcome.command, asked)
            show_next_steps(suite, given, asked, store, uri, has_others=has_others)
    finally:
        report(outcome.failures, uri, outcome.recorded)
    if outcome.left:  # --fail-fast
        complain(f"not carried out: {counted(outcome.left, 'run')}; the same command goes on.", label="--fail-fast")
    return SOME_FAILED if outcome.failures else FINE


def _stopped(outcome: Carried, stopped: KeyboardInterrupt | Exception, *, is_rerun: bool) -> int:
    """Say why the command stopped before its end, and how to resume; the exit code."""
    from fedbench.runs.engines.engine import RUN_THREAD
    from fedbench.tracking.recording import StoreUnavailable

    if isinstance(stopped, StoreUnavailable):
        complain(str(stopped), label="stopped")
        code = SOME_FAILED
    elif isinstance(stopped, KeyboardInterrupt):
        stored = f"{outcome.skipped + outcome.done} of {len(outcome.specs)} runs are finished and stored"
        how = "repeats them, and goes on with those cut short" if is_rerun else "resumes with the rest"
        complain(f"{stored}; the same command {how}.", label="interrupted")
        code = INTERRUPTED
    else:
        raise stopped
    # a run that is still under way in this process can't be stopped, and torch would abort
    if any(thread.name == RUN_THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def show_leaderboard(suite: Suite, uri: str, specs: Sequence[RunSpec], command: str, asked: str) -> bool:
    """Print the tables of the requested runs, with all that is comparable to them; whether the store has others.

    They are stored with the run of the ``command`` as well, if there is one; ``asked`` is what they are read by.
    """
    # imports scipy's statistics, for which no run should wait
    from fedbench_boards.leaderboard.board import of_suite as leaderboard
    from fedbench_boards.leaderboard.failures import of_tables
    from fedbench_boards.leaderboard.formats import render_terminal
    from fedbench_boards.leaderboard.published import published_folder, published_of
    from fedbench_boards.leaderboard.reading import ReadResults
    from fedbench_boards.leaderboard.results import load_curves, load_runs

    stored = load_runs(uri, suite.name)
    finished, failed = of_tables(stored.finished, stored.failed, [spec.run_id for spec in specs])
    curves = load_curves(uri, finished, *suite.headlines)
    published = published_of(suite, published_folder(None))
    board = leaderboard(suite, finished, curves, published, failed=failed)
    console().print(render_terminal(board))
    if command:
        named = suite.model_copy(update={"name": asked})
        _record(ReadResults(named, stored, finished, curves, board), uri, command)
    return len(finished) < len(stored.finished)


def _record(read: ReadResults, uri: str, command: str) -> None:
    """Table and page as artifacts of the command's run, the first row of every table as its metrics."""
    import mlflow

    from fedbench.tracking.recording import record_board
    from fedbench_boards.leaderboard.formats import to_csv, to_markdown
    from fedbench_boards.leaderboard.page import write_page
    from fedbench_boards.leaderboard.results import load_federations

    board = read.board
    if not board.lines:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "leaderboard.md").write_text(to_markdown(board), encoding="utf-8")
        (folder / "leaderboard.csv").write_text(to_csv(board), encoding="utf-8")
        federations = load_federations(uri, read.results)
        of = f"fedbench leaderboard --suite {shlex.quote(read.suite.name)}"
        write_page(folder / "index.html", read, federations, of)
        try:
            record_board(uri, command, folder, *_best(board))
        except (OSError, mlflow.MlflowException) as error:
            complain(f"the leaderboard can't be stored with the command: {error}.", label="warning")


def _best(board: Board) -> tuple[dict[str, float], str]:
    """The metrics of the first row of every table, those of the first table called as a run's, and the rows' names."""
    from fedbench.tracking.schema import FINAL

    metrics: dict[str, float] = {}
    for number, table in enumerate(board.tables, start=1):
        best = table.lines[0]
        # MLflow would replace a comma
        of = f"{best.setting.replace(',', '') or f'table {number}'}/" if number > 1 else ""
        values = {metric: best.cell(metric).mean for metric in table.shown} | {"megabytes": best.sent / 1e6}
        metrics |= {f"{FINAL}{of}{name}": value for name, value in values.items() if not math.isnan(value)}
    names = [" · ".join(filter(None, (table.lines[0].setting, table.lines[0].row))) for table in board.tables]
    return metrics, "; ".join(names)


def show_next_steps(
    suite: Suite, given: str | None, asked: str, store: str | None, uri: str, *, has_others: bool
) -> None:
    """Where the results are, and the commands that read them; ``has_others``: the store has other tables too.

    A suite's file is named as it was ``given``: its name would find its runs, but not how it has them read. Runs
    without one are read by what was ``asked`` for.
    """
    from fedbench.tracking.databases import masked, shown

    where = f" --store {shlex.quote(masked(store))}" if store else ""
    tables = f"fedbench leaderboard --suite {shlex.quote(given or suite.name)}{where}"
    these = f"fedbench leaderboard --suite {shlex.quote(asked)}{where}" if not given else tables
    say(f"store        {shown(uri)}")
    say(f"look inside  {_page(uri, suite.name) or f'fedbench ui{where}'}")
    if these != tables:
        say(f"these again  {these}")
    if has_others:
        say(f"all tables   {tables}")
    # a data set's name may have what no folder's can
    folder = "leaderboards/" + re.sub(r"[?*:|<>\\\"]", "_", asked)
    say(f"as files     {these} --output {shlex.quote(folder)}")


def _page(uri: str, suite: str) -> str:
    """The address at which a server shows the suite's runs; "" of a store that is none."""
    from fedbench.tracking.databases import shown
    from fedbench.tracking.store import experiment_of, open_store, page

    if urlparse(uri).scheme not in ("http", "https"):
        return ""
    client = open_store(uri, create=False)
    return shown(uri).rstrip("/") + ("" if client is None else page(experiment_of(client, uri, suite)))

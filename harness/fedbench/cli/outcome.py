"""What a command says once its runs have ended: tables, failures, and what to do next."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
import tempfile
import threading
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from fedbench.cli.console import complain, console, say
from fedbench.core.spec import RunSpec
from fedbench.core.wording import counted
from fedbench.runs.engines.engine import RUN_THREAD
from fedbench.runs.engines.events import RunFailed
from fedbench.suites.suite import ADHOC, Suite, asked_for
from fedbench.tracking.databases import shown
from fedbench.tracking.recording import Invocation, StoreUnavailable
from fedbench.workflow.execution import Carried

if TYPE_CHECKING:
    import pandas as pd

    from fedbench_boards.leaderboard.model import Board

FINE, SOME_FAILED, INTERRUPTED = 0, 1, 130


def conclude(outcome: Carried, suite: Suite, given: str | None, store: str | None, *, is_rerun: bool) -> int:
    """Show the leaderboard, or why there is none yet, and the failures; the exit code.

    ``given`` are the suite's name or file and ``store`` the folder or URI on the command line.
    """
    uri, stopped = outcome.uri, outcome.stopped
    if stopped is not None:
        report(outcome.failures, uri, outcome.recorded)
        if not isinstance(stopped, KeyboardInterrupt | StoreUnavailable):
            raise stopped
        stored = f"{outcome.skipped + outcome.done} of {len(outcome.specs)} runs are finished and stored"
        say_stopped(stopped, stored, is_rerun=is_rerun)
        code = INTERRUPTED if isinstance(stopped, KeyboardInterrupt) else SOME_FAILED
        _leave_while_busy(code)
        return code
    try:
        if outcome.skipped or outcome.done or outcome.failures:
            asked = asked_for(suite.name, outcome.specs)
            has_others = show_leaderboard(suite, uri, outcome.specs, outcome.command, asked)
            show_next_steps(given or suite.name, asked, store, uri, _page(uri, suite.name), has_others=has_others)
    finally:
        report(outcome.failures, uri, outcome.recorded)
    if outcome.left:  # --fail-fast
        complain(f"not carried out: {counted(outcome.left, 'run')}; the same command goes on.", label="--fail-fast")
    return SOME_FAILED if outcome.failures else FINE


def _leave_while_busy(code: int) -> None:
    """End the process at once if a run is still under way in it: the run can't be stopped, and torch would abort."""
    if any(thread.name == RUN_THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def show_leaderboard(suite: Suite, uri: str, specs: Sequence[RunSpec], command: str, asked: str) -> bool:
    """Print the tables of the requested runs, with all that is comparable to them; whether the store has others.

    They are stored with the run of the ``command`` as well, if there is one; ``asked`` is what they are read by.
    """
    # imports scipy's statistics, for which no run should wait
    from fedbench_boards.leaderboard.board import of_suite as leaderboard
    from fedbench_boards.leaderboard.failures import of_tables
    from fedbench_boards.leaderboard.formats import render_terminal
    from fedbench_boards.leaderboard.published import published_folder, published_of
    from fedbench_boards.leaderboard.results import load_curves, load_runs

    stored = load_runs(uri, suite.name)
    finished, failed = of_tables(stored.finished, stored.failed, [spec.run_id for spec in specs])
    curves = load_curves(uri, finished, *suite.headlines)
    published = published_of(suite, published_folder(None))
    board = leaderboard(suite, finished, curves, published, failed=failed)
    console().print(render_terminal(board))
    if command:
        _record(suite.model_copy(update={"name": asked}), uri, finished, board, curves, command)
    return len(finished) < len(stored.finished)


def _record(suite: Suite, uri: str, finished: pd.DataFrame, board: Board, curves: pd.DataFrame, command: str) -> None:
    """Table and page as artifacts of the command's run, the first row of every table as its metrics."""
    import mlflow

    from fedbench.tracking.recording import record_board
    from fedbench_boards.leaderboard.formats import to_csv, to_markdown
    from fedbench_boards.leaderboard.page import write_page
    from fedbench_boards.leaderboard.results import load_federations

    if not board.lines:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "leaderboard.md").write_text(to_markdown(board), encoding="utf-8")
        (folder / "leaderboard.csv").write_text(to_csv(board), encoding="utf-8")
        federations = load_federations(uri, finished)
        of = f"fedbench leaderboard --suite {shlex.quote(suite.name)}"
        write_page(folder / "index.html", suite.name, suite.description, finished, board, curves, federations, of)
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


def show_next_steps(suite: str, asked: str, store: str | None, uri: str, page: str, *, has_others: bool) -> None:
    """Where the results are, and the commands that read them; ``suite`` is its name or file, since a file's
    name would find its runs, but not how it has them read; ``asked`` is the suite's name, or of runs without a suite
    file that of their group; ``page`` is a server's; ``has_others``: the store has other tables too."""
    where = f" --store {shlex.quote(store)}" if store else ""
    tables = f"fedbench leaderboard --suite {shlex.quote(suite)}{where}"
    these = f"fedbench leaderboard --suite {shlex.quote(asked)}{where}" if suite == ADHOC else tables
    say(f"store        {shown(uri)}")
    say(f"look inside  {page or f'fedbench ui{where}'}")
    if these != tables:
        say(f"these again  {these}")
    if has_others:
        say(f"all tables   {tables}")
    # a data set's name may have what no folder's can
    folder = "leaderboards/" + re.sub(r"[?*:|<>\\\"]", "_", asked)
    say(f"as files     {these} --output {shlex.quote(folder)}")


def _page(uri: str, suite: str) -> str:
    """The address at which a server shows the suite's runs; "" of a store that is none."""
    from fedbench.tracking.store import experiment_of, open_store, page

    if urlparse(uri).scheme not in ("http", "https"):
        return ""
    client = open_store(uri, create=False)
    return shown(uri).rstrip("/") + ("" if client is None else page(experiment_of(client, uri, suite)))


def report(failures: Sequence[RunFailed], uri: str, invocation: Invocation | None) -> None:
    """Every failed run with its reason; tracebacks go to a file beside the store, behind older ones, else to stderr."""
    for failure in failures:
        complain(f"{failure.spec.title}, seed {failure.spec.seed}: {failure.reason}", label="failed")
    details = [
        f"{failure.spec.title}, seed {failure.spec.seed}, run {failure.spec.run_id}\n{failure.details}"
        for failure in failures
        if failure.details
    ]
    folder = _store_folder(uri)
    if details and folder is not None:
        assert invocation is not None
        log = folder / "failures.log"
        heading = f"==== {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}  {invocation.command}\n"
        try:
            with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                # in one piece: another command on the same store may write as well
                file.write("\n".join([heading, *details, ""]))
        except OSError as error:
            complain(f"the tracebacks can't be written to {log}: {error}.", label="warning")
        else:
            complain(f"tracebacks are at the end of {log}.", label=f"{len(failures)} of the runs failed")
    elif details:
        console(stderr=True).print("\n".join(details), markup=False, soft_wrap=True)


def say_stopped(stopped: KeyboardInterrupt | StoreUnavailable, stored: str, *, is_rerun: bool) -> None:
    """Why a command stopped before its end, and how to resume."""
    if isinstance(stopped, StoreUnavailable):
        complain(str(stopped), label="stopped")
    else:
        how = "repeats them, and goes on with those cut short" if is_rerun else "resumes with the rest"
        complain(f"{stored}; the same command {how}.", label="interrupted")


def _store_folder(uri: str) -> Path | None:
    """The folder of a store on this machine's disk; None for a server."""
    parts = urlparse(uri)
    if parts.scheme == "sqlite":
        return Path(uri.removeprefix("sqlite:///")).parent
    if parts.scheme in ("", "file"):
        return Path(parts.path)
    return None

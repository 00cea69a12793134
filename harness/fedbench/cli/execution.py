"""Carrying out ``fedbench run``: skip what is stored, run the rest, show the leaderboard."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from urllib.parse import urlparse

from fedbench.checkpoint import Checkpointing, discard
from fedbench.claims import Claims, work_folder
from fedbench.cli import plan
from fedbench.cli.console import complain, console, say
from fedbench.cli.live import LiveProgress
from fedbench.cli.options import Request, command_line
from fedbench.cli.progress import PlainProgress, Progress
from fedbench.cli.stored import origins_of, say_stored
from fedbench.engine import Policy, default_workers, execute, with_cores
from fedbench.engines import Engine
from fedbench.engines.in_process import RUN_THREAD, InProcess
from fedbench.engines.processes import Processes
from fedbench.events import Event, RunFailed, notify
from fedbench.hookspecs import hookimpl, plugin_manager, relay
from fedbench.invocation import Invocation
from fedbench.patience import HURRY, StoreUnavailable
from fedbench.prepare import Settings
from fedbench.resuming import Origin, stored_runs
from fedbench.run_code import Codes
from fedbench.runs import checkpoints_of
from fedbench.spec import RunSpec
from fedbench.store import store_uri
from fedbench.suite import Suite
from fedbench.tracking import Tracking
from fedbench.uris import shown
from fedbench.wording import counted

FINE, SOME_FAILED, INTERRUPTED = 0, 1, 130


def carry_out(request: Request, suite: Suite, specs: Sequence[RunSpec], settings: Settings) -> int:
    """Run what is not in the store yet; the exit code. Bad input raises FedbenchError before anything is run."""
    uri = store_uri(request.store)
    planned, failed = plan.plan(suite, specs, settings)
    # a row that has failed here fails as a run as well, which is recorded like any other
    rows = [row.specs for row in planned] + [row.specs for row in failed]
    carried = {spec.run_id for row in rows for spec in row}
    specs = [spec for spec in specs if spec.run_id in carried]
    codes = Codes(request.plugin_files)
    origins = origins_of(planned, codes)
    known = {} if request.rerun else stored_runs(uri, suite.name, origins)
    finished = {run_id for run_id, why in known.items() if not why}
    pending = [spec for spec in specs if spec.run_id not in finished]
    skipped = len(specs) - len(pending)
    say_stored(specs, known)
    work = work_folder(uri, suite.name, settings.cache_dir)
    hashes = {spec.method: codes.of(spec.method).hash for spec in specs}
    checkpoints = Checkpointing(work / "checkpoints", hashes, request.checkpoint_every)
    for run_id in finished:
        discard(checkpoints.folder, run_id)
    settings = replace(settings, checkpoints=checkpoints)
    _say_resumed(pending, origins, settings)
    # before a store is made for it: it may not be available here
    engine = _engine(request, settings, pending) if pending else None
    try:
        claims = Claims(
            work / "claims", lambda spec: spec.run_id in origins and tracking.has_finished(spec, origins[spec.run_id])
        )
        asked = invocation(request, pending, skipped, suite.text) if pending else None
        tracking = Tracking(
            uri, suite.name, asked, claims, tell=_warn, patience=request.patience, rerun=request.rerun, codes=codes
        )
    except BaseException:
        if engine is not None:
            engine.close()
        raise
    if engine is not None:
        policy = Policy(request.run_timeout, request.retries, fail_fast=request.fail_fast)
        events = execute(pending, settings, 1, engine=engine, policy=policy, claims=claims)
        ended = _run_all(request, suite, pending, events, _Cleaning(checkpoints.folder), tracking)
    else:
        # one that was killed right behind its last run still is marked as running
        tracking.end_dead_commands()
        ended = _Ended(0, [])
    if ended.stopped is not None:
        _report(ended.failures, uri, asked)
        stored = f"{skipped + ended.done} of {len(specs)} runs are finished and stored"
        _say_stopped(ended.stopped, stored, is_rerun=request.rerun)
        _leave_while_busy(INTERRUPTED if isinstance(ended.stopped, KeyboardInterrupt) else SOME_FAILED)
        return INTERRUPTED if isinstance(ended.stopped, KeyboardInterrupt) else SOME_FAILED
    if skipped or ended.done or ended.failures:
        has_others = _show_leaderboard(suite, uri, specs)
        _show_next_steps(request, suite, uri, has_others=has_others)
    _report(ended.failures, uri, asked)
    left = len(pending) - len(ended.failures) - ended.done
    if left and request.fail_fast:
        complain(f"not carried out: {counted(left, 'run')}; the same command goes on.", label="--fail-fast")
    return SOME_FAILED if ended.failures else FINE


@dataclass(frozen=True)
class _Ended:
    """How far a command got."""

    done: int
    failures: list[RunFailed]
    stopped: KeyboardInterrupt | StoreUnavailable | None = None


def _run_all(
    request: Request,
    suite: Suite,
    pending: Sequence[RunSpec],
    events: Generator[Event, None, None],
    cleaning: _Cleaning,
    tracking: Tracking,
) -> _Ended:
    """Carry out ``pending``, tracked and shown. Whatever stops it, no run stays marked as running if the store can be
    written.
    """
    is_live = console().is_terminal and not request.plain
    view = (LiveProgress if is_live else PlainProgress)(console(), suite.name, pending)
    failures: list[RunFailed] = []
    HURRY.clear()
    try:
        _listen(events, [view, cleaning, tracking], view, failures)
    except KeyboardInterrupt as error:
        HURRY.set()
        with _shielded(), suppress(StoreUnavailable):
            tracking.interrupt()
        return _Ended(view.done, failures, error)
    except StoreUnavailable as error:
        return _Ended(view.done, failures, error)
    except Exception:
        with suppress(StoreUnavailable):
            tracking.interrupt()
        raise
    if request.fail_fast and failures:
        tracking.interrupt()
    return _Ended(view.done, failures)


def _say_stopped(stopped: KeyboardInterrupt | StoreUnavailable, stored: str, *, is_rerun: bool) -> None:
    if isinstance(stopped, StoreUnavailable):
        complain(str(stopped), label="stopped")
    else:
        how = "repeats them, and goes on with those cut short" if is_rerun else "resumes with the rest"
        complain(f"{stored}; the same command {how}.", label="interrupted")


def _engine(request: Request, settings: Settings, pending: Sequence[RunSpec]) -> Engine:
    """The engine that was asked for. Raises FedbenchError where it is not available here."""
    workers = request.workers or default_workers()
    if request.engine == "ray":
        from fedbench.engines.ray_cluster import RayCluster, check_device

        for spec in pending:
            check_device(spec, request.run_gpus)
        return RayCluster(settings, request.ray_address, request.run_cpus, request.run_gpus, request.workers)
    settings = with_cores(settings, len(pending), workers)
    if request.engine == "in-process":
        return InProcess(settings)
    memory = None if request.memory_limit is None else int(request.memory_limit * 1e9)
    return Processes(settings, min(workers, len(pending)), memory)


def _say_resumed(pending: Sequence[RunSpec], origins: Mapping[str, Origin], settings: Settings) -> None:
    """Which runs go on from a checkpoint."""
    for spec in pending:
        origin = origins.get(spec.run_id)
        if origin is None:  # its row could not be planned: it will fail, and has no checkpoint
            continue
        number = checkpoints_of(spec, origin.data_hash, origin.weights_hash, settings).round()
        if number:
            after = f"round {number} of {spec.training.rounds}"
            say(f"{spec.title}, seed {spec.seed}: goes on from its checkpoint after {after}.")


def _warn(text: str) -> None:
    complain(text, label="warning")


class _Cleaning:
    """A listener that lets go of the checkpoints of runs that are stored."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @hookimpl
    def run_finished(self, spec: RunSpec) -> None:
        """The run's checkpoints go."""
        discard(self._folder, spec.run_id)


def _show_leaderboard(suite: Suite, uri: str, specs: Sequence[RunSpec]) -> bool:
    """Print the tables of the requested runs, with all that is comparable to them; whether the store has others."""
    # imports scipy's statistics, for which no run should wait
    from fedbench.failures import of_tables
    from fedbench.leaderboard import of_suite as leaderboard
    from fedbench.leaderboard import render_terminal
    from fedbench.published import published_folder, published_of
    from fedbench.results import load_curves, load_runs

    stored = load_runs(uri, suite.name)
    finished, failed = of_tables(stored.finished, stored.failed, [spec.run_id for spec in specs])
    curves = load_curves(uri, finished, suite.headline)
    published = published_of(suite, published_folder(None))
    board = leaderboard(suite, finished, curves, published, failed=failed)
    console().print(render_terminal(board))
    return len(finished) < len(stored.finished)


def invocation(request: Request, pending: Sequence[RunSpec], skipped: int, suite_text: str = "") -> Invocation:
    """The request and the runs carried out now, as recorded: FILEs by their names, and no folder of this machine."""
    return Invocation(
        command=command_line("run", request, *(["--rerun"] if request.rerun else [])),
        runs=len(pending),
        skipped=skipped,
        scale=pending[0].scale,
        settings=request.settings,
        methods=request.methods,
        seeds=request.seeds,
        overrides=request.overrides,
        plugin_files=request.plugin_files,
        suite_text=suite_text,
    )


def _listen(
    events: Generator[Event, None, None], listeners: Sequence[object], view: Progress, failures: list[RunFailed]
) -> None:
    """Tell ``listeners``, the last one first, of every event, and keep the failures."""
    manager = plugin_manager()
    for listener in listeners:
        # pluggy calls the last registered first: a run counts as done once it is stored
        manager.register(listener)
    hooks = relay(manager)
    with view, closing(events):
        for event in events:
            with _shielded():
                notify(hooks, event)
            if isinstance(event, RunFailed):
                failures.append(event)


@contextmanager
def _shielded() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, so that an event reaches the store whole and no run stays half written."""
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        asked = True
        HURRY.set()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


def _leave_while_busy(code: int) -> None:
    """End the process at once if a run is still under way in it: the run can't be stopped, and torch would abort."""
    if any(thread.name == RUN_THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _show_next_steps(request: Request, suite: Suite, uri: str, *, has_others: bool) -> None:
    where = f" --store {shlex.quote(request.store)}" if request.store else ""
    # a suite file's own name would find its runs, but not how it has them read
    tables = f"fedbench leaderboard --suite {shlex.quote(request.suite or suite.name)}{where}"
    say(f"store        {shown(uri)}")
    is_server = urlparse(uri).scheme in ("http", "https")
    say(f"look inside  {shown(uri) if is_server else f'fedbench ui{where}'}")
    if has_others:
        say(f"all tables   {tables}")
    say(f"as files     {tables} --output {shlex.quote(f'leaderboards/{suite.name}')}")


def _report(failures: Sequence[RunFailed], uri: str, asked: Invocation | None) -> None:
    """Every failed run with its reason; tracebacks go to a file beside the store, behind older ones, else to stderr."""
    for failure in failures:
        complain(f"{failure.spec.title}, seed {failure.spec.seed}: {failure.reason}", label="failed")
    details = [
        f"{failure.spec.title}, seed {failure.spec.seed}, run {failure.spec.run_id}\n{failure.details}"
        for failure in failures
        if failure.details
    ]
    folder = store_folder(uri)
    if details and folder is not None:
        assert asked is not None
        log = folder / "failures.log"
        heading = f"==== {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}  {asked.command}\n"
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


def store_folder(uri: str) -> Path | None:
    """The folder of a store on this machine's disk; None for a server."""
    parts = urlparse(uri)
    if parts.scheme == "sqlite":
        return Path(uri.removeprefix("sqlite:///")).parent
    if parts.scheme in ("", "file"):
        return Path(parts.path)
    return None

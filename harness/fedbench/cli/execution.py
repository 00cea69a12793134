"""Carrying out ``fedbench run``: skip what is stored, run the rest, show the leaderboard."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fedbench.cli import plan
from fedbench.cli.console import complain, console, resumable
from fedbench.cli.live import LiveProgress
from fedbench.cli.options import Request, command_line
from fedbench.cli.outcome import report, say_stopped, show_leaderboard, show_next_steps
from fedbench.cli.progress import PlainProgress, Progress
from fedbench.cli.stored import origins_of, say_resumed, say_stored
from fedbench.core.hooks import hookimpl, plugin_manager
from fedbench.core.notifications import notifier
from fedbench.core.spec import RunSpec
from fedbench.core.wording import counted
from fedbench.plugins.run_code import Codes
from fedbench.runs.checkpoint import Checkpointing, discard
from fedbench.runs.engines import Engine
from fedbench.runs.engines.claims import Claims, work_folder
from fedbench.runs.engines.events import Event, RunFailed, notify
from fedbench.runs.engines.in_process import RUN_THREAD, InProcess
from fedbench.runs.engines.processes import Processes
from fedbench.runs.engines.scheduler import Policy, default_workers, execute, with_cores
from fedbench.runs.prepare import Settings
from fedbench.suites.suite import Suite
from fedbench.tracking.invocation import Invocation
from fedbench.tracking.listener import Tracking
from fedbench.tracking.patience import HURRY, StoreUnavailable
from fedbench.tracking.resuming import stored_runs
from fedbench.tracking.store import store_uri

FINE, SOME_FAILED, INTERRUPTED = 0, 1, 130


@resumable()
def carry_out(request: Request, suite: Suite, specs: Sequence[RunSpec], settings: Settings) -> int:
    """Run what is not in the store yet; the exit code. Bad input raises FedbenchError before anything is run."""
    uri = store_uri(request.store)
    planned, failed = plan.plan(suite, specs, settings, in_process=request.engine == "in-process")
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
    say_resumed(pending, origins, settings)
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
        report(ended.failures, uri, asked)
        if not isinstance(ended.stopped, KeyboardInterrupt | StoreUnavailable):
            raise ended.stopped
        stored = f"{skipped + ended.done} of {len(specs)} runs are finished and stored"
        say_stopped(ended.stopped, stored, is_rerun=request.rerun)
        _leave_while_busy(INTERRUPTED if isinstance(ended.stopped, KeyboardInterrupt) else SOME_FAILED)
        return INTERRUPTED if isinstance(ended.stopped, KeyboardInterrupt) else SOME_FAILED
    try:
        if skipped or ended.done or ended.failures:
            has_others = show_leaderboard(suite, uri, specs)
            show_next_steps(request, suite, uri, has_others=has_others)
    finally:
        report(ended.failures, uri, asked)
    left = len(pending) - len(ended.failures) - ended.done
    if left and request.fail_fast:
        complain(f"not carried out: {counted(left, 'run')}; the same command goes on.", label="--fail-fast")
    return SOME_FAILED if ended.failures else FINE


@dataclass(frozen=True)
class _Ended:
    """How far a command got."""

    done: int
    failures: list[RunFailed]
    stopped: KeyboardInterrupt | Exception | None = None


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
    except Exception as error:
        with suppress(StoreUnavailable):
            tracking.interrupt()
        return _Ended(view.done, failures, error)
    if request.fail_fast and failures:
        tracking.interrupt()
    return _Ended(view.done, failures)


def _engine(request: Request, settings: Settings, pending: Sequence[RunSpec]) -> Engine:
    """The engine that was asked for. Raises FedbenchError where it is not available here."""
    workers = request.workers or default_workers()
    if request.engine == "ray":
        from fedbench.runs.engines.ray.cluster import RayCluster, check_device

        for spec in pending:
            check_device(spec, request.run_gpus)
        return RayCluster(settings, request.ray_address, request.run_cpus, request.run_gpus, request.workers)
    settings = with_cores(settings, len(pending), workers)
    if request.engine == "in-process":
        return InProcess(settings)
    memory = None if request.memory_limit is None else int(request.memory_limit * 1e9)
    return Processes(settings, min(workers, len(pending)), memory)


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
    hooks = notifier(manager)
    with view, closing(events):
        for event in events:
            if isinstance(event, RunFailed):
                failures.append(event)
            with _shielded():
                notify(hooks, event)


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

"""Carrying out ``fedbench run``: skip what is stored, run the rest, show the leaderboard."""

from __future__ import annotations

import math
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
from fedbench.cli.options import Place, Selection, command_line
from fedbench.cli.outcome import report, say_stopped, show_leaderboard, show_next_steps
from fedbench.cli.progress import LiveProgress, PlainProgress, Progress
from fedbench.cli.stored import origins_of, say_resumed, say_stored
from fedbench.core.method.hooks import hookimpl, plugin_manager
from fedbench.core.method.notifications import notifier
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
from fedbench.tracking.resuming import stored_runs
from fedbench.tracking.schema import store_uri
from fedbench.tracking.writing.listener import Tracking
from fedbench.tracking.writing.patience import HURRY, StoreUnavailable

FINE, SOME_FAILED, INTERRUPTED = 0, 1, 130


@dataclass(frozen=True)
class Storing:
    """How results are stored."""

    store: str | None
    rerun: bool
    """Whether runs are repeated that the store has."""
    patience: float
    """Seconds for which a store that can't be written is tried again."""
    checkpoint_every: int
    """Rounds between two checkpoints; 0: every 30 seconds."""
    state_memory: float | None
    """Gigabytes of what clients keep that stay in a run's memory; None: all of it."""


@resumable()
def carry_out(
    selection: Selection,
    suite: Suite,
    specs: Sequence[RunSpec],
    settings: Settings,
    place: Place,
    policy: Policy,
    storing: Storing,
    *,
    plain: bool,
) -> int:
    """Run what is not in the store yet; the exit code. Bad input raises FedbenchError before anything is run."""
    uri = store_uri(storing.store)
    found = plan.plan(suite, specs, settings, in_process=place.engine == "in-process")
    planned, failed = found.rows, found.failed
    # a row that has failed here fails as a run as well, which is recorded like any other
    rows = [row.specs for row in planned] + [row.specs for row in failed]
    carried = {spec.run_id for row in rows for spec in row}
    specs = [spec for spec in specs if spec.run_id in carried]
    codes = Codes(selection.plugin_files)
    origins = origins_of(planned, codes)
    known = {} if storing.rerun else stored_runs(uri, suite.name, origins)
    finished = {run_id for run_id, why in known.items() if not why}
    pending = [spec for spec in specs if spec.run_id not in finished]
    skipped = len(specs) - len(pending)
    say_stored(specs, known)
    work = work_folder(uri, suite.name, settings.cache_dir)
    hashes = {spec.method: codes.of(spec.method).hash for spec in specs}
    budget = math.inf if storing.state_memory is None else storing.state_memory * 1e9
    checkpoints = Checkpointing(work / "checkpoints", hashes, storing.checkpoint_every, budget)
    for run_id in finished:
        discard(checkpoints.folder, run_id)
    settings = replace(settings, checkpoints=checkpoints)
    say_resumed(pending, origins, settings)
    # before a store is made for it: it may not be available here
    engine = _engine(place, settings, pending) if pending else None
    try:
        claims = Claims(
            work / "claims", lambda spec: spec.run_id in origins and tracking.has_finished(spec, origins[spec.run_id])
        )
        recorded = invocation(selection, pending, skipped, suite.text, is_rerun=storing.rerun) if pending else None
        tracking = Tracking(
            uri, suite.name, recorded, claims, tell=_warn, patience=storing.patience, rerun=storing.rerun, codes=codes
        )
    except BaseException:
        if engine is not None:
            engine.close()
        raise
    if engine is not None:
        events = execute(pending, settings, 1, engine=engine, policy=policy, claims=claims)
        view = (LiveProgress if console().is_terminal and not plain else PlainProgress)(console(), suite.name, pending)
        ended = _run_all(view, events, _Cleaning(checkpoints.folder), tracking)
        if policy.fail_fast and ended.failures and ended.stopped is None:
            tracking.interrupt()
    else:
        # one that was killed right behind its last run still is marked as running
        tracking.end_dead_commands()
        ended = _Ended(0, [])
    if ended.stopped is not None:
        report(ended.failures, uri, recorded)
        if not isinstance(ended.stopped, KeyboardInterrupt | StoreUnavailable):
            raise ended.stopped
        stored = f"{skipped + ended.done} of {len(specs)} runs are finished and stored"
        say_stopped(ended.stopped, stored, is_rerun=storing.rerun)
        _leave_while_busy(INTERRUPTED if isinstance(ended.stopped, KeyboardInterrupt) else SOME_FAILED)
        return INTERRUPTED if isinstance(ended.stopped, KeyboardInterrupt) else SOME_FAILED
    try:
        if skipped or ended.done or ended.failures:
            has_others = show_leaderboard(suite, uri, specs)
            show_next_steps(suite, selection.suite, storing.store, uri, has_others=has_others)
    finally:
        report(ended.failures, uri, recorded)
    left = len(pending) - len(ended.failures) - ended.done
    if left and policy.fail_fast:
        complain(f"not carried out: {counted(left, 'run')}; the same command goes on.", label="--fail-fast")
    return SOME_FAILED if ended.failures else FINE


@dataclass(frozen=True)
class _Ended:
    """How far a command got."""

    done: int
    failures: list[RunFailed]
    stopped: KeyboardInterrupt | Exception | None = None


def _run_all(view: Progress, events: Generator[Event, None, None], cleaning: _Cleaning, tracking: Tracking) -> _Ended:
    """Carry out the runs of ``events``, tracked and shown.

    Whatever stops it, no run stays marked as running if the store can be written.
    """
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
    return _Ended(view.done, failures)


def _engine(place: Place, settings: Settings, pending: Sequence[RunSpec]) -> Engine:
    """The engine of ``place``. Raises FedbenchError where it is not available here."""
    workers = place.workers or default_workers()
    if place.engine == "ray":
        from fedbench.runs.engines.ray.cluster import RayCluster, check_device

        for spec in pending:
            check_device(spec, place.run_gpus)
        return RayCluster(settings, place.ray_address, place.run_cpus, place.run_gpus, place.workers)
    settings = with_cores(settings, len(pending), workers)
    if place.engine == "in-process":
        return InProcess(settings)
    memory = None if place.memory_limit is None else int(place.memory_limit * 1e9)
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


def invocation(
    selection: Selection, pending: Sequence[RunSpec], skipped: int, suite_text: str = "", *, is_rerun: bool
) -> Invocation:
    """The selection and the runs carried out now, as recorded: FILEs by their names, and no folder of this machine."""
    return Invocation(
        command=command_line("run", selection, *(["--rerun"] if is_rerun else [])),
        runs=len(pending),
        skipped=skipped,
        scale=pending[0].scale,
        settings=selection.settings,
        methods=selection.methods,
        seeds=selection.seeds,
        overrides=selection.sets,
        plugin_files=selection.plugin_files,
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
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        pressed = True
        HURRY.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _leave_while_busy(code: int) -> None:
    """End the process at once if a run is still under way in it: the run can't be stopped, and torch would abort."""
    if any(thread.name == RUN_THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

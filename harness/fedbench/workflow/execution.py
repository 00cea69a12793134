"""Carrying out runs: what is stored is skipped, which is said, and the rest is run and recorded."""

from __future__ import annotations

import math
import signal
import sys
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from mlflow.exceptions import MlflowException

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hooks import hookimpl, plugin_manager
from fedbench.core.method.notifications import notifier
from fedbench.core.spec import RunSpec
from fedbench.plugins.provenance import Codes
from fedbench.runs.checkpoint import Checkpointing, discard
from fedbench.runs.engines import Engine
from fedbench.runs.engines.cards import cards_for, places_of
from fedbench.runs.engines.claims import Claims, work_folder
from fedbench.runs.engines.engine import InProcess, Policy, Processes, default_workers, execute, with_cores
from fedbench.runs.engines.events import Event, RunFailed, notify
from fedbench.runs.job import checkpoints_of
from fedbench.runs.prepare import Settings
from fedbench.suites.suite import Suite, asked_for
from fedbench.tracking.databases import check_server
from fedbench.tracking.listener import Tracking
from fedbench.tracking.read import Origin, stored_runs
from fedbench.tracking.recording import HURRY, Invocation, StoreUnavailable
from fedbench.tracking.schema import database_of, folder_at, store_uri
from fedbench.workflow import plan
from fedbench.workflow.console import complain, console
from fedbench.workflow.plan import PlannedRow, rows_of
from fedbench.workflow.screens import Screen
from fedbench.workflow.selection import Place, Selection, command_line


@dataclass(frozen=True)
class Storing:
    """How results are stored."""

    store: str | None
    rerun: bool = False
    """Whether runs are repeated that the store has."""
    patience: float = 120.0
    """Seconds for which a store that can't be written is tried again."""
    checkpoint_every: int = 0
    """Rounds between two checkpoints; 0: every 30 seconds."""
    state_memory: float | None = None
    """Gigabytes of what clients keep that stay in a run's memory; None: all of it."""


@dataclass(frozen=True)
class Carried:
    """What became of runs that were asked for."""

    uri: str
    """URI of the store."""
    specs: tuple[RunSpec, ...]
    """All of them, but for rows that their backbone is not for."""
    skipped: int
    """Number of runs that the store had."""
    done: int = 0
    """Number of runs carried out."""
    failures: tuple[RunFailed, ...] = ()
    stopped: KeyboardInterrupt | Exception | None = None
    """What ended it early, where it was not a failure and ``fail_fast``."""
    recorded: Invocation | None = None
    """As the store has it; None where nothing was carried out."""
    command: str = ""
    """MLflow's id of the command's run, the parent of what was carried out; "" where nothing was."""

    @property
    def left(self) -> int:
        """Runs that were not carried out."""
        return len(self.specs) - self.skipped - self.done - len(self.failures)


def carry_out(
    selection: Selection,
    suite: Suite,
    specs: Sequence[RunSpec],
    settings: Settings,
    place: Place,
    policy: Policy,
    storing: Storing,
    screen: Screen,
) -> Carried:
    """Run what is not in the store yet. Bad input raises FedbenchError before anything is run.

    Ctrl-C and whatever else stops it is in the outcome: by then no run is marked as running.
    """
    uri = store_uri(storing.store)
    check_server(uri)  # before minutes go into data
    found = plan.plan(suite, specs, settings, screen, in_process=place.engine == "in-process")
    planned, failed = found.rows, found.failed
    # a row that has failed here fails as a run as well, which is recorded like any other
    rows = [row.specs for row in planned] + [row.specs for row in failed]
    carried = {spec.run_id for row in rows for spec in row}
    specs = [spec for spec in specs if spec.run_id in carried]
    codes = Codes(selection.plugin_files)
    origins = origins_of(planned, codes, suite)
    known = {} if storing.rerun else stored_runs(uri, suite.name, origins)
    finished = {run_id for run_id, why in known.items() if not why}
    pending = [spec for spec in specs if spec.run_id not in finished]
    skipped = len(specs) - len(pending)
    say_stored(specs, known, screen)
    work = work_folder(uri, suite.name, settings.cache_dir)
    hashes = {spec.run_id: codes.of_run(spec).hash for spec in specs}
    budget = math.inf if storing.state_memory is None else storing.state_memory * 1e9
    checkpoints = Checkpointing(work / "checkpoints", hashes, storing.checkpoint_every, budget)
    for run_id in finished:
        discard(checkpoints.folder, run_id)
    settings = replace(settings, checkpoints=checkpoints)
    say_resumed(pending, origins, settings, screen)
    # before a store is made for it: it may not be available here
    engine = engine_of(place, settings, pending, len(pending)) if pending else None
    try:
        claims = Claims(
            work / "claims", lambda spec: spec.run_id in origins and tracking.has_finished(spec, origins[spec.run_id])
        )
        asked = asked_for(suite.name, specs)
        recorded = invocation(selection, pending, skipped, suite, asked, is_rerun=storing.rerun) if pending else None
        tell = partial(screen.complain, label="warning")
        tracking = Tracking(
            uri, suite.name, recorded, claims, tell=tell, patience=storing.patience, rerun=storing.rerun, codes=codes
        )
    except BaseException:
        if engine is not None:
            engine.close()
        raise
    outcome = Carried(uri, tuple(specs), skipped, recorded=recorded)
    if engine is None:
        # one that was killed right behind its last run still is marked as running
        tracking.end_dead_commands()
        return outcome
    events = execute(pending, settings, 1, engine=engine, policy=policy, claims=claims)
    seen = _Seen(checkpoints.folder)
    stopped = _run_all(screen.progress(suite.name, pending), events, seen, tracking)
    if policy.fail_fast and seen.failures and stopped is None:
        tracking.interrupt()
    return replace(outcome, done=seen.done, failures=tuple(seen.failures), stopped=stopped, command=tracking.command)


def _run_all(
    view: AbstractContextManager[object], events: Generator[Event, None, None], seen: _Seen, tracking: Tracking
) -> KeyboardInterrupt | Exception | None:
    """Carry out the runs of ``events``, tracked and shown; what stopped it, None where they all ended.

    Whatever stops it, no run stays marked as running if the store can be written.
    """
    HURRY.clear()
    manager = plugin_manager()
    try:
        with closing(events), view as shown:
            # pluggy calls the last registered first: a run counts as done once it is stored
            for listener in (shown, seen, tracking):
                manager.register(listener)
            hooks = notifier(manager)
            for event in events:
                if isinstance(event, RunFailed):
                    seen.failures.append(event)
                with _shielded():
                    notify(hooks, event)
    except KeyboardInterrupt as error:
        HURRY.set()
        with _shielded(), suppress(StoreUnavailable):
            tracking.interrupt()
        return error
    except StoreUnavailable as error:
        return error
    except Exception as error:
        with suppress(StoreUnavailable):
            tracking.interrupt()
        return error
    return None


def engine_of(place: Place, settings: Settings, specs: Sequence[RunSpec], runs: int = sys.maxsize) -> Engine:
    """The engine of ``place`` for ``runs`` like ``specs``, by default more than it has workers.

    FedbenchError where it is not available here.
    """
    workers = place.workers or default_workers()
    if place.engine == "ray":
        from fedbench.runs.engines.ray import RayCluster, check_device

        for spec in specs:
            check_device(spec, place.run_gpus)
        return RayCluster(settings, place.ray_address, place.run_cpus, place.run_gpus, place.workers)
    if place.engine == "in-process":
        return InProcess(with_cores(settings, runs, workers))
    cards = cards_for(specs, settings.devices)
    each = place.workers or default_workers(cards)
    settings = with_cores(settings, runs, each * places_of(cards))
    memory = None if place.memory_limit is None else int(place.memory_limit * 1e9)
    return Processes(settings, min(each, runs), memory, cards)


class _Seen:
    """A listener that counts what has ended, and lets go of the checkpoints of runs that are stored."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.done = 0
        self.failures: list[RunFailed] = []

    @hookimpl
    def run_finished(self, spec: RunSpec) -> None:
        self.done += 1
        discard(self._folder, spec.run_id)

    @hookimpl
    def run_skipped(self) -> None:
        """Another process has finished it."""
        self.done += 1


def invocation(
    selection: Selection,
    pending: Sequence[RunSpec],
    skipped: int,
    suite: Suite | None = None,
    asked: str = "",
    *,
    is_rerun: bool,
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
        overrides=selection.assignments,
        plugin_files=selection.plugin_files,
        suite_text="" if suite is None else suite.text,
        suite_version=1 if suite is None else suite.version,
        asked_for=asked,
    )


@contextmanager
def _shielded() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, so that an event reaches the store whole and no run stays half written."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Ctrl-C is raised in the main thread alone
        return
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


def origins_of(planned: Sequence[PlannedRow], codes: Codes, suite: Suite) -> dict[str, Origin]:
    """Run id -> what the run is made from, for all runs of the plan."""
    return {
        spec.run_id: Origin(codes.of_run(spec), row.info.data_hash, row.info.weights_hash, suite.version)
        for row in planned
        for spec in row.specs
    }


def show_stored(
    store: str | None,
    suite: Suite,
    planned: Sequence[PlannedRow],
    plugin_files: tuple[Path, ...],
    screen: Screen,
    *,
    is_rerun: bool,
) -> None:
    """`say_stored` of a dry run; one that cannot read the store warns, since it needs none."""
    origins = origins_of(planned, Codes(plugin_files), suite)
    try:
        stored = stored_runs(store_uri(store, to_write=False), suite.name, origins)
    except (FedbenchError, MlflowException) as error:
        screen.complain(f"which runs are in the store already is not known: {error}", label="warning")
        return
    say_stored([spec for row in planned for spec in row.specs], {} if is_rerun else stored, screen)


def say_stored(specs: Sequence[RunSpec], stored: Mapping[str, tuple[str, ...]], screen: Screen) -> None:
    """How many runs are skipped and, where some run again, a line for the rows that stand alike.

    ``stored``: run id -> why a run is repeated, nothing for one that is skipped. An empty store gives no line.
    """
    skipped = sum(stored.get(spec.run_id) == () for spec in specs)
    if skipped:
        screen.say(f"{skipped} of {len(specs)} runs are in the store already and are skipped; --rerun repeats them.")
    if not stored or skipped == len(specs):
        return
    alike: dict[str, list[str]] = {}
    rows = rows_of(specs)
    for row in rows:
        alike.setdefault(_standing(row, stored), []).append(row[0].title)
    for standing, titles in alike.items():
        which = "every row" if len(titles) == len(rows) > 1 else ", ".join(titles)
        screen.say(f"{standing}: {which}", style="dim")


def _standing(row: Sequence[RunSpec], stored: Mapping[str, tuple[str, ...]]) -> str:
    """``1 of 3 in the store, 2 again (data changed)``."""
    skipped = sum(stored.get(spec.run_id) == () for spec in row)
    repeated = Counter("; ".join(why) for spec in row if (why := stored.get(spec.run_id)))
    parts = [f"{skipped} of {len(row)} in the store", *(f"{number} again ({why})" for why, number in repeated.items())]
    return ", ".join(parts)


def say_resumed(pending: Sequence[RunSpec], origins: Mapping[str, Origin], settings: Settings, screen: Screen) -> None:
    """Say which runs go on from a checkpoint."""
    for spec in pending:
        origin = origins.get(spec.run_id)
        if origin is None:  # its row could not be planned: it will fail, and has no checkpoint
            continue
        number = checkpoints_of(spec, origin.data_hash, origin.weights_hash, settings).round()
        if number:
            after = f"round {number} of {spec.training.rounds}"
            screen.say(f"{spec.title}, seed {spec.seed}: goes on from its checkpoint after {after}.")


def report(failures: Sequence[RunFailed], uri: str, invocation: Invocation | None) -> None:
    """Every failed run with its reason; tracebacks go to a file beside the store, behind older ones, else to stderr."""
    for failure in failures:
        complain(f"{failure.spec.title}, seed {failure.spec.seed}: {failure.reason}", label="failed")
    details = [
        f"{failure.spec.title}, seed {failure.spec.seed}, run {failure.spec.run_id}\n{failure.details}"
        for failure in failures
        if failure.details
    ]
    database = database_of(uri)
    folder = folder_at(uri) if database is None else database.parent
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

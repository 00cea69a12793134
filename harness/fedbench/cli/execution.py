"""Carrying out ``fedbench run``: skip what is stored, run the rest, show the leaderboard."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlparse

from fedbench import engine
from fedbench.cli import plan
from fedbench.cli.console import complain, console, say
from fedbench.cli.live import LiveProgress
from fedbench.cli.options import Request, command_line
from fedbench.cli.progress import PlainProgress, Progress
from fedbench.hookspecs import plugin_manager, relay
from fedbench.invocation import Invocation
from fedbench.prepare import Settings
from fedbench.provenance import code_hash
from fedbench.spec import RunSpec
from fedbench.suite import Suite
from fedbench.tracking import Tracking, finished_run_ids, store_uri

FINE, SOME_FAILED, INTERRUPTED = 0, 1, 130


def carry_out(request: Request, suite: Suite, specs: Sequence[RunSpec], settings: Settings) -> int:
    """Run what is not in the store yet; the exit code. Bad input raises FedbenchError before anything is run."""
    uri = store_uri(request.store)
    planned = plan.plan(specs, settings)
    inputs = {spec.run_id: (row.info.data_hash, row.info.weights_hash) for row in planned for spec in row.specs}
    code = code_hash(request.plugin_files)
    finished = set() if request.rerun else finished_run_ids(uri, suite.name, code, inputs)
    pending = [spec for spec in specs if spec.run_id not in finished]
    skipped = len(specs) - len(pending)
    if skipped:
        say(f"{skipped} of {len(specs)} runs are in the store already and are skipped; --rerun repeats them.")
    failures: list[engine.RunFailed] = []
    done = skipped
    if pending:
        is_live = console().is_terminal and not request.plain
        view = (LiveProgress if is_live else PlainProgress)(console(), suite.name, pending)
        tracking = Tracking(uri, suite.name, invocation(request, pending, skipped))
        try:
            failures = _execute(pending, settings, request.workers or engine.default_workers(), tracking, view)
        except KeyboardInterrupt:
            with _shielded():
                tracking.interrupt()
            stored = f"{skipped + view.done} of {len(specs)} runs are finished and stored"
            complain(f"{stored}; the same command resumes with the rest.", label="interrupted")
            _leave_while_busy()
            return INTERRUPTED
        except Exception:
            # whatever broke, no run may stay marked as running
            tracking.interrupt()
            raise
        done += view.done
    if done:
        _show_leaderboard(suite, uri)
        _show_next_steps(suite, request.store, uri)
    _report(failures, uri)
    return SOME_FAILED if failures else FINE


def _show_leaderboard(suite: Suite, uri: str) -> None:
    # imports scipy's statistics, for which no run should wait
    from fedbench.leaderboard import load_results, render_terminal
    from fedbench.leaderboard import of_suite as leaderboard
    from fedbench.published import published_folder, published_of
    from fedbench.results import load_curves

    results = load_results(uri, suite.name)
    curves = load_curves(uri, results, suite.headline)
    board = leaderboard(suite, results, curves, published_of(suite, published_folder(None)))
    console().print(render_terminal(board))


def invocation(request: Request, pending: Sequence[RunSpec], skipped: int) -> Invocation:
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
    )


def _execute(
    specs: Sequence[RunSpec], settings: Settings, workers: int, tracking: Tracking, view: Progress
) -> list[engine.RunFailed]:
    """Run all specs, tracking and showing every event; the failures."""
    manager = plugin_manager()
    manager.register(view)
    # pluggy calls the last registered first: a run counts as done once it is stored
    manager.register(tracking)
    hooks = relay(manager)
    failures = []
    with view, closing(engine.execute(specs, settings, workers)) as events:
        for event in events:
            with _shielded():
                engine.notify(hooks, event)
            if isinstance(event, engine.RunFailed):
                failures.append(event)
    return failures


@contextmanager
def _shielded() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, so that an event reaches the store whole and no run stays half written."""
    asked = []
    before = signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


def _leave_while_busy() -> None:
    """End the process at once if a run is still under way in it: the run can't be stopped, and torch would abort."""
    if any(thread.name == engine.RUN_THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)


def _show_next_steps(suite: Suite, store: str | None, uri: str) -> None:
    name, where = shlex.quote(suite.name), f" --store {shlex.quote(store)}" if store else ""
    say(f"store        {uri}")
    is_server = urlparse(uri).scheme in ("http", "https")
    say(f"look inside  {uri if is_server else f'fedbench ui{where}'}")
    say(f"as files     fedbench leaderboard --suite {name}{where} --output leaderboards/{name}")


def _report(failures: Sequence[engine.RunFailed], uri: str) -> None:
    """Every failed run with its reason; tracebacks go to a file beside the store, else to stderr."""
    for failure in failures:
        complain(f"{failure.spec.title}, seed {failure.spec.seed}: {failure.reason}", label="failed")
    details = [
        f"{failure.spec.title}, seed {failure.spec.seed}, run {failure.spec.run_id}\n{failure.details}"
        for failure in failures
        if failure.details
    ]
    folder = store_folder(uri)
    if details and folder is not None:
        log = folder / "failures.log"
        log.write_text("\n".join(details), encoding="utf-8")
        complain(f"tracebacks are in {log}.", label=f"{len(failures)} of the runs failed")
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

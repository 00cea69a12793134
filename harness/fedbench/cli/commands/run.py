"""``fedbench run``: the options of a run; ``fedbench.workflow`` carries it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fedbench.cli.console import resumable
from fedbench.cli.options import (
    CACHE_DIR,
    DATA_DIR,
    MOST,
    Assignments,
    CacheDir,
    DataDir,
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
    Workers,
    all_assignments,
    finite,
    plugin_files,
)
from fedbench.core.errors import FedbenchError
from fedbench.core.files import expanded
from fedbench.workflow.selection import Place, Selection

if TYPE_CHECKING:
    from fedbench.core.spec import RunSpec
    from fedbench.runs.prepare import Settings
    from fedbench.suites.suite import Suite

_SuiteName = Annotated[str | None, typer.Option(metavar="NAME|FILE", help="A suite by name, or a YAML file.")]
_Dataset = Annotated[
    str | None, typer.Option(metavar="NAME", help="Same as --set dataset=NAME; picks a grid's settings.")
]
_Scenario = Annotated[str | None, typer.Option(metavar="NAME", help="Same as --set scenario=NAME.")]
_Backbone = Annotated[str | None, typer.Option(metavar="NAME", help="Same as --set backbone=NAME.")]
_Tuned = Annotated[str, typer.Option(metavar="STUDY", help="With the best values that fedbench tune found.")]
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
_Plain = Annotated[bool, typer.Option("--plain", help="Progress as plain lines, as in a pipe.")]


def run(
    further: Further = None,
    suite: _SuiteName = None,
    method: Method = None,
    on: On = None,
    seed: Seed = None,
    assignment: Assignments = None,
    dataset: _Dataset = None,
    scenario: _Scenario = None,
    backbone: _Backbone = None,
    scale: Scale = "",
    setting: Setting = None,
    tuned: _Tuned = "",
    storage: Storage = None,
    plugin: Plugins = None,
    dry_run: _DryRun = False,
    rerun: _Rerun = False,
    store: Store = None,
    workers: Workers = None,
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
    plain: _Plain = False,
) -> None:
    """Run a suite, or single methods, and show the leaderboard.

    Runs already in the store, made by the same code, are skipped, and unfinished ones go on from their last checkpoint:
    the same command resumes what was stopped, however that was.
    """
    _warm_up(engine)
    from fedbench.cli.screen import Terminal
    from fedbench.rounds.executors import executor_named
    from fedbench.runs.prepare import Settings
    from fedbench.workflow import plan
    from fedbench_boards.leaderboard.published import check_published, published_folder

    place = Place(engine, workers, ray_address, run_cpus, run_gpus, memory_limit)
    _check(place, run_timeout)
    folders = expanded(data_dir, "--data-dir"), expanded(cache_dir, "--cache-dir")
    sets = all_assignments(assignment, further, dataset=dataset, scenario=scenario, backbone=backbone)
    methods, seeds, grid, files = tuple(method or ()), tuple(seed or ()), tuple(setting or ()), plugin_files(plugin)
    selection = Selection(suite, methods, seeds, sets, files, scale, grid, tuple(on or ()), tuned)
    chosen, specs = plan.requested(selection, Terminal(), store, storage)
    check_published(chosen, published_folder(None))
    settings = Settings(*folders, files, executor=executor_named(executor))
    if dry_run:
        raise typer.Exit(_dry_run(chosen, specs, settings, store, place, is_rerun=rerun))
    from fedbench.cli.outcome import conclude
    from fedbench.runs.engines.engine import Policy
    from fedbench.workflow.execution import Storing, carry_out

    policy = Policy(run_timeout, retries, fail_fast=fail_fast)
    storing = Storing(store, rerun, patience, checkpoint_every, state_memory)
    with resumable():
        outcome = carry_out(selection, chosen, specs, settings, place, policy, storing, Terminal(plain=plain))
        code = conclude(outcome, chosen, suite, store, is_rerun=rerun)
    raise typer.Exit(code)


def _warm_up(engine: str) -> None:
    """Let the processes of rows and runs import beside this one."""
    from fedbench.runs.engines import warm_up

    if engine != "in-process":
        warm_up()


def _check(place: Place, run_timeout: float | None) -> None:
    """Raise FedbenchError for an engine that there is not, and for options that have no effect on it."""
    from fedbench.runs.engines import ENGINES

    place.check(ENGINES)
    if place.engine != "processes" and place.memory_limit is not None:
        raise FedbenchError(f"--memory-limit has no effect with --engine {place.engine}; leave one out.")
    if place.engine == "in-process" and run_timeout is not None:
        raise FedbenchError("a run in this process can't be ended; leave --run-timeout or --engine in-process out.")


def _dry_run(
    suite: Suite, specs: list[RunSpec], settings: Settings, store: str | None, place: Place, *, is_rerun: bool
) -> int:
    """Show what the runs cost and which are stored; the exit code."""
    from fedbench.cli import dry_run
    from fedbench.cli.screen import Terminal
    from fedbench.workflow import plan

    found = plan.plan(suite, specs, settings, Terminal(), dry=True, in_process=place.engine == "in-process")
    # imports MLflow, which no wrong input should wait for
    from fedbench.workflow.stored import show_stored

    dry_run.show(suite, found, settings)
    show_stored(store, suite, found.rows, settings.plugin_files, Terminal(), is_rerun=is_rerun)
    return 1 if found.failed else 0

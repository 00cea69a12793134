"""``fedbench run``: the options of a run; ``fedbench.cli.execution`` does what they ask."""

from __future__ import annotations

from typing import Annotated

import typer

from fedbench.cli.options import (
    CACHE_DIR,
    DATA_DIR,
    MOST,
    Assignments,
    CacheDir,
    DataDir,
    EngineOption,
    Further,
    Plugins,
    RayAddress,
    Request,
    RunCpus,
    RunGpus,
    Storage,
    Store,
    Workers,
    all_assignments,
    finite,
    plugin_files,
)
from fedbench.core.files import expanded


def run(
    further: Further = None,
    suite: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="A suite by name, or a YAML file.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(metavar="METHOD", help="Only these rows, or others (a+b); repeat it."),
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(metavar="INT", help="Only these seeds; repeat it.", min=0)] = None,
    assignment: Assignments = None,
    dataset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Same as --set dataset=NAME; picks a grid's settings.")
    ] = None,
    scenario: Annotated[str | None, typer.Option(metavar="NAME", help="Same as --set scenario=NAME.")] = None,
    backbone: Annotated[str | None, typer.Option(metavar="NAME", help="Same as --set backbone=NAME.")] = None,
    scale: Annotated[str, typer.Option(metavar="NAME", help="The suite's grid at this scale; else its first.")] = "",
    setting: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only these settings of the grid; repeat it.")
    ] = None,
    tuned: Annotated[str, typer.Option(metavar="STUDY", help="With the best values that fedbench tune found.")] = "",
    storage: Storage = None,
    plugin: Plugins = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show runs, traffic and memory; train nothing.")] = False,
    rerun: Annotated[bool, typer.Option("--rerun", help="Repeat runs that the store already has.")] = False,
    store: Store = None,
    workers: Workers = None,
    executor: Annotated[
        str, typer.Option(metavar="NAME", help="How cohorts are trained: auto, cohort (at once), sequential.")
    ] = "auto",
    engine: EngineOption = "processes",
    ray_address: RayAddress = "",
    run_cpus: RunCpus = 1.0,
    run_gpus: RunGpus = 0.0,
    checkpoint_every: Annotated[
        int, typer.Option(metavar="ROUNDS", help="Between checkpoints; by default every 30 seconds.", min=0)
    ] = 0,
    run_timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="A run that takes longer has failed.", min=0.1, max=MOST, callback=finite),
    ] = None,
    memory_limit: Annotated[
        float | None,
        typer.Option(metavar="GB", help="A run that takes more memory has failed.", min=0.1, max=MOST, callback=finite),
    ] = None,
    retries: Annotated[
        int, typer.Option(metavar="INT", help="Further tries where a process died, or disk or memory were full.", min=0)
    ] = 2,
    patience: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="For which a store that can't be written is tried again.",
            min=0,
            max=MOST,
            callback=finite,
        ),
    ] = 120.0,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first run that fails.")] = False,
    data_dir: DataDir = DATA_DIR,
    cache_dir: CacheDir = CACHE_DIR,
    plain: Annotated[bool, typer.Option("--plain", help="Progress as plain lines, as in a pipe.")] = False,
) -> None:
    """Run a suite, or single methods, and show the leaderboard.

    Runs already in the store, made by the same code, are skipped, and unfinished ones go on from their last checkpoint:
    the same command resumes what was stopped, however that was.
    """
    from fedbench.runs.engines import forkserver as pool

    if engine != "in-process":
        pool.warm_up()  # the processes of rows and runs import beside this one
    from fedbench.cli import plan
    from fedbench.core.errors import FedbenchError, unknown_name
    from fedbench.rounds.executors import EXECUTORS
    from fedbench.runs.engines import ENGINES
    from fedbench.runs.prepare import Settings

    request = Request(
        suite=suite,
        methods=tuple(method or ()),
        seeds=tuple(seed or ()),
        assignments=all_assignments(assignment, further),
        dataset=dataset,
        scenario=scenario,
        backbone=backbone,
        plugin_files=plugin_files(plugin),
        scale=scale,
        settings=tuple(setting or ()),
        store=store,
        data_dir=expanded(data_dir, "--data-dir"),
        cache_dir=expanded(cache_dir, "--cache-dir"),
        workers=workers,
        rerun=rerun,
        plain=plain,
        tuned=tuned,
        storage=storage,
        engine=engine,
        ray_address=ray_address,
        run_cpus=run_cpus,
        run_gpus=run_gpus,
        run_timeout=run_timeout,
        memory_limit=memory_limit,
        retries=retries,
        patience=patience,
        fail_fast=fail_fast,
        checkpoint_every=checkpoint_every,
    )
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    if engine != "processes" and memory_limit is not None:
        raise FedbenchError(f"--memory-limit has no effect with --engine {engine}; leave one out.")
    if engine == "in-process" and run_timeout is not None:
        raise FedbenchError("a run in this process can't be ended; leave --run-timeout or --engine in-process out.")
    if engine != "ray" and (ray_address or run_cpus != 1 or run_gpus):
        raise FedbenchError("--ray-address, --run-cpus and --run-gpus are for --engine ray.")
    chosen, specs = plan.requested(request)
    if executor not in EXECUTORS:
        raise unknown_name("executor", executor, EXECUTORS)
    settings = Settings(request.data_dir, request.cache_dir, request.plugin_files, executor=executor)
    if dry_run:
        planned, failed = plan.plan(chosen, specs, settings, dry=True, in_process=engine == "in-process")
        # imports MLflow, which no wrong input should wait for
        from fedbench.cli.stored import show_stored

        plan.show(chosen, planned, failed)
        show_stored(request, chosen, planned)
        raise typer.Exit(1 if failed else 0)
    from fedbench.cli.execution import carry_out

    raise typer.Exit(carry_out(request, chosen, specs, settings))

"""``fedbench tune``: search the hyper-parameters of a suite's rows, with the same budget for each."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from fedbench.cli.console import say
from fedbench.cli.options import (
    CACHE_DIR,
    DATA_DIR,
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
    all_assignments,
    command_line,
    finite,
    plugin_files,
)
from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.files import expanded


def tune(
    suite: Annotated[str, typer.Option(metavar="NAME|FILE", help="A suite by name, or a YAML file.")],
    further: Further = None,
    method: Annotated[
        list[str] | None, typer.Option(metavar="METHOD", help="Only these rows; repeat it. By default all.")
    ] = None,
    trials: Annotated[int, typer.Option(metavar="INT", help="Trials for every row, its own values first.", min=1)] = 20,
    objective: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC", help="What is tuned for: tail, worst_domain, bytes ...; repeat it for a front."),
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(metavar="INT", help="Seeds of every trial; by default one that the suite has not.", min=0),
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Search only these (lr, fedprox.mu); repeat it.")
    ] = None,
    pruner: Annotated[str, typer.Option(metavar="median|halving|none", help="Who ends hopeless trials.")] = "median",
    validation: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Of the training data, to measure on.", min=0.01, max=0.9, callback=finite),
    ] = 0.2,
    study: Annotated[str, typer.Option(metavar="NAME", help="Name of the study; by default the suite's.")] = "",
    storage: Storage = None,
    assignment: Assignments = None,
    scale: Annotated[str, typer.Option(metavar="NAME", help="The suite's grid at this scale; else its first.")] = "",
    setting: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only these settings of the grid; repeat it.")
    ] = None,
    plugin: Plugins = None,
    store: Store = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be searched; train nothing.")] = False,
    workers: Annotated[
        int | None,
        typer.Option("--jobs", "-j", metavar="INT", help="Trials at the same time; by default one a core.", min=1),
    ] = None,
    engine: EngineOption = "processes",
    ray_address: RayAddress = "",
    run_cpus: RunCpus = 1.0,
    run_gpus: RunGpus = 0.0,
    data_dir: DataDir = DATA_DIR,
    cache_dir: CacheDir = CACHE_DIR,
) -> None:
    """Tune the rows of a suite on validation data, with an equal budget for each.

    Searches the learning rate and what each method declares. The test split is never seen. Stopped or killed, the same
    command goes on; several at once share the work. fedbench run --tuned NAME then runs the best values.
    """
    from fedbench.runs.engines import forkserver as pool

    pool.warm_up()  # the processes of rows and trials import beside this one
    from fedbench.cli import plan, tuning
    from fedbench.runs.engines.scheduler import default_workers
    from fedbench.runs.prepare import Settings
    from fedbench.tracking.store import store_uri
    from fedbench.tuning.storage import storage_url
    from fedbench.tuning.studies import Budget
    from fedbench.tuning.trial import PRUNERS

    if pruner not in PRUNERS:
        raise FedbenchError(f"--pruner {pruner!r} is not one of {', '.join(PRUNERS)}.")
    if engine not in ("processes", "ray"):
        raise unknown_name("engine", engine, ("processes", "ray"))
    if engine != "ray" and (ray_address or run_cpus != 1 or run_gpus):
        raise FedbenchError("--ray-address, --run-cpus and --run-gpus are for --engine ray.")
    request = Request(
        suite=suite,
        methods=tuple(method or ()),
        seeds=(0,),
        assignments=all_assignments(assignment, further),
        plugin_files=plugin_files(plugin),
        scale=scale,
        settings=tuple(setting or ()),
        store=store,
        data_dir=expanded(data_dir, "--data-dir"),
        cache_dir=expanded(cache_dir, "--cache-dir"),
    )
    chosen, specs = plan.requested(request)
    objectives = tuple(objective or [chosen.objective or chosen.headline])
    if not objective and objectives == ("global_accuracy",) and any(s.scenario.imbalance == "natural" for s in specs):
        say(
            "the validation split has the data's own tail, so that all classes count alike: balanced_accuracy",
            style="dim",
        )
        objectives = ("balanced_accuracy",)
    names = [name.removesuffix("_accuracy") for name in objectives]
    if len(set(names)) < len(names) or "" in names:
        raise FedbenchError(f"--objective {' '.join(objectives)}: every objective must have a name, and stand once.")
    for key in (text.partition("=")[0].strip() for text in request.assignments):
        if key.rpartition(".")[2] in ("validation", "finetune_epochs"):
            raise FedbenchError(f"--set {key} has no effect on trials; leave it out (the share is --validation).")
    for spec in specs:
        if not spec.training.rounds:
            raise FedbenchError(f"{spec.title} has no rounds to tune; set rounds above 0.")
    if len(objectives) > 1 and pruner != "none":
        say("several objectives: no trial is pruned, since none is hopeless by one of them alone", style="dim")
        pruner = "none"
    seeds = tuple(sorted(set(seed or [tuning.unused_seed(chosen)])))
    budget = Budget(trials, seeds, objectives, pruner, validation=validation)
    settings = Settings(request.data_dir, request.cache_dir, request.plugin_files)
    uri = store_uri(store)
    url = storage_url(storage, uri)
    if url == uri:
        raise FedbenchError(
            "--storage and --store are the same database, in which the tables of studies and of runs would clash; give "
            "studies one of their own."
        )
    # a data set may have picked another scale than the first
    at = scale or (specs[0].scale if specs[0].scale != next(iter(chosen.scales), "") else "")
    name = study or chosen.name + (f"-{at}" if at else "")
    asked = {
        "--trials": [str(trials)],
        "--objective": objective or [],
        "--param": param or [],
        "--pruner": [pruner],
        "--validation": [f"{validation:g}"],
        "--study": [name],
    }
    words = [word for option, values in asked.items() for value in values for word in (option, value)]
    command = command_line("tune", replace(request, seeds=seeds), *words)
    records, has_failed = tuning.records_of(name, chosen, specs, budget, settings, command, tuple(param or ()))
    if dry_run:
        tuning.show_space(records)
        raise typer.Exit(tuning.FAILED if has_failed else 0)
    if engine == "ray":
        from fedbench.runs.engines.ray.cluster import check_device
        from fedbench.runs.engines.ray.nodes import RayNodes
        from fedbench.tuning.on_ray import check_reach, tune_on

        for spec in specs:
            check_device(spec, run_gpus)
        with RayNodes(ray_address, run_cpus, run_gpus, workers, settings.plugin_files) as nodes:
            check_reach(nodes, url, uri)
            start = partial(tune_on, nodes, run_cpus)
            code = tuning.carry_out(url, uri, records, settings, nodes.room(), start)
    else:
        code = tuning.carry_out(url, uri, records, settings, workers or default_workers())
    if code == 0:
        tuning.show_next_steps(name, request, storage)
    raise typer.Exit(code or (tuning.FAILED if has_failed else 0))

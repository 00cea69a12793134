"""``fedbench tune``: search the hyper-parameters of a suite's rows, with the same budget for each."""

from __future__ import annotations

from typing import Annotated

import typer

from fedbench.cli.options import (
    CACHE_DIR,
    DATA_DIR,
    Assignments,
    CacheDir,
    DataDir,
    Devices,
    EngineOption,
    Further,
    On,
    Plugins,
    RayAddress,
    RunCpus,
    RunGpus,
    Scale,
    Setting,
    Storage,
    Store,
    all_assignments,
    devices_of,
    finite,
    plugin_files,
)
from fedbench.core.files import expanded

_SuiteName = Annotated[str, typer.Option(metavar="NAME|FILE", help="A suite by name, or a YAML file.")]
_Method = Annotated[
    list[str] | None, typer.Option("--method", metavar="METHOD", help="Only these rows; repeat it. By default all.")
]
_Trials = Annotated[int, typer.Option(metavar="INT", help="Trials for every row, its own values first.", min=1)]
_Objective = Annotated[
    list[str] | None,
    typer.Option(metavar="METRIC", help="What is tuned for: tail, worst_domain, bytes ...; repeat it for a front."),
]
_Seed = Annotated[
    list[int] | None,
    typer.Option(metavar="INT", help="Seeds of every trial; by default three that the suite has not.", min=0),
]
_Confirm = Annotated[
    int | None,
    typer.Option(
        metavar="INT",
        help="Seeds of a run-off of the best three, and as many to confirm; by default 1, and 0 with a single --seed.",
        min=0,
    ),
]
_Param = Annotated[list[str] | None, typer.Option(metavar="KEY", help="Search only these (lr, fedprox.mu); repeat it.")]
_Pruner = Annotated[str, typer.Option(metavar="median|halving|none", help="Who ends hopeless trials.")]
_Validation = Annotated[
    float,
    typer.Option(metavar="SHARE", help="Of the training data, to measure on.", min=0.01, max=0.9, callback=finite),
]
_Study = Annotated[str, typer.Option(metavar="NAME", help="Name of the study; by default the suite's.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be searched; train nothing.")]
_Workers = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        metavar="INT",
        help="Runs of trials at the same time, with device=cuda on each card; by default one a core.",
        min=1,
    ),
]


def tune(
    suite: _SuiteName,
    further: Further = None,
    method: _Method = None,
    on: On = None,
    trials: _Trials = 20,
    objective: _Objective = None,
    seed: _Seed = None,
    confirm: _Confirm = None,
    param: _Param = None,
    pruner: _Pruner = "median",
    validation: _Validation = 0.2,
    study: _Study = "",
    storage: Storage = None,
    assignment: Assignments = None,
    scale: Scale = "",
    setting: Setting = None,
    plugin: Plugins = None,
    store: Store = None,
    dry_run: _DryRun = False,
    workers: _Workers = None,
    devices: Devices = "",
    engine: EngineOption = "processes",
    ray_address: RayAddress = "",
    run_cpus: RunCpus = 1.0,
    run_gpus: RunGpus = 0.0,
    data_dir: DataDir = DATA_DIR,
    cache_dir: CacheDir = CACHE_DIR,
) -> None:
    """Tune the rows of a suite on validation data, with an equal budget for each.

    Searches the learning rate and what each method declares. The test split is never seen. A trial's value is the mean
    over seeds; further seeds decide among the best trials and confirm the choice. Stopped or killed, the same command
    goes on; several at once share the work. fedbench run --tuned NAME then runs the best values.
    """
    from fedbench.runs.engines import ENGINES, warm_up

    warm_up()  # the processes of rows and trials import beside this one
    from fedbench.cli import tuning
    from fedbench.runs.prepare import Settings
    from fedbench.workflow.screens import Terminal
    from fedbench.workflow.selection import Place, Selection
    from fedbench.workflow.studies import Wanted, planned

    place = Place(engine, workers, ray_address, run_cpus, run_gpus, devices=devices_of(devices))
    place.check(ENGINES)
    files, sets = plugin_files(plugin), all_assignments(assignment, further)
    folders = expanded(data_dir, "--data-dir"), expanded(cache_dir, "--cache-dir")
    settings = Settings(*folders, files, devices=place.devices)
    grid, chosen = tuple(setting or ()), tuple(method or ())
    selection = Selection(chosen, (0,), sets, files, scale, grid, tuple(on or ()), suite=suite)
    searched, seeds = tuple(param or ()), tuple(seed or ())
    wanted = Wanted(trials, tuple(objective or ()), seeds, searched, pruner, validation, study, confirm)
    plan = planned(selection, wanted, settings, store, storage, Terminal())
    if dry_run:
        tuning.show_space(plan.records)
    else:
        code = tuning.carry_out(plan, settings, place)
        if code:
            raise typer.Exit(code)
        tuning.show_next_steps(plan.name, selection, store, storage)
    raise typer.Exit(tuning.FAILED if plan.has_failed else 0)

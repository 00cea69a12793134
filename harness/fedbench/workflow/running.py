"""``fedbench.run``: runs carried out, recorded and found again as by ``fedbench run``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset
from fedbench.core.spec import RunSpec
from fedbench.kinds.registry import own_plugins
from fedbench.rounds.executors import executor_named
from fedbench.runs.engines import ENGINES
from fedbench.runs.engines.engine import Policy
from fedbench.runs.prepare import Settings
from fedbench.suites.expand import expand
from fedbench.suites.resolve import RUN_KEYS
from fedbench.suites.suite import single
from fedbench.workflow import plan
from fedbench.workflow.asking import Folder, Names, assignments, files, folders, names, numbers, text_or_none
from fedbench.workflow.execution import Storing, carry_out, report
from fedbench.workflow.own import Network, OwnObjects
from fedbench.workflow.results import Results
from fedbench.workflow.screens import screen_for
from fedbench.workflow.selection import Place, Selection
from fedbench_boards.leaderboard.published import check_published, published_folder


def run(
    *methods: str | type | RunSpec,
    suite: str | None = None,
    seeds: int | Iterable[int] | None = None,
    dataset: str | Dataset | None = None,
    scenario: str | None = None,
    backbone: str | Network | None = None,
    set: Mapping[str, Any] | None = None,
    scale: str = "",
    setting: Names | None = None,
    tuned: str = "",
    plugins: Folder | Iterable[Folder] | None = None,
    store: Folder | None = None,
    storage: Folder | None = None,
    rerun: bool = False,
    jobs: int | None = None,
    devices: Names | None = None,
    engine: str | None = None,
    executor: str = "auto",
    run_timeout: float | None = None,
    fail_fast: bool = False,
    data_dir: Folder | None = None,
    cache_dir: Folder | None = None,
    progress: bool = True,
    **settings: Any,
) -> Results:
    """Run methods, or a suite, and return their results.

    It does what ``fedbench run`` does, with options and settings of the same names: runs are recorded in the same
    store under the same ids, those that it has are skipped, and those that were stopped go on.

        fedbench.run("fedavg", "fedprox", scenario="label-skew", rounds=5, seeds=[0, 1])
        fedbench.run("fedprox", set={"fedprox.mu": [0.01, 0.1]}, dirichlet_alpha=0.1)      # a row for each value
        fedbench.run(suite="longtail")
        fedbench.run(RunSpec(method="fedavg"))                                             # one run, fully described

    Settings are keyword arguments; ``set=`` takes those whose names have a dot. A program's own objects need no
    registration: a method's class among the ``methods`` (a subclass of `fedbench.api.Method`), a `Dataset`, as a
    ``backbone`` an ``nn.Module`` from images (b, 3, h, w) to features (b, d), or a class or function that makes one,
    whose weights then follow a run's seed, as ``partition`` a `fedbench.api.Partition` and among ``metrics`` a
    `fedbench.api.Metric`: classes, or objects with parameters. They are called ``object:NAME-HASH``, methods and
    metrics by their ``name``; content and source are part of the hashes by which runs are found again. Such runs go on
    in this process, one after another, since objects can't be sent to others: what a run changes in it, it changes for
    those after it.

    Raises FedbenchError for bad input before anything is run. A run that fails is a row with its reason, as in every
    table; Ctrl-C leaves what is finished.
    """
    screen, objects = screen_for(progress), OwnObjects()
    given = tuple(one for one in methods if isinstance(one, RunSpec))
    own = {"dataset": objects.dataset(dataset), "scenario": scenario, "backbone": objects.backbone(backbone)}
    selection = Selection(
        objects.methods([one for one in methods if not isinstance(one, RunSpec)]),
        numbers(seeds),
        assignments(objects.settings(set), own | objects.settings(settings)),
        files(plugins),
        scale,
        names(setting),
        suite=text_or_none(suite),
        tuned=tuned,
    )
    place = _place(engine, jobs, names(devices), run_timeout, bool(objects.plugins))
    at = Settings(*folders(data_dir, cache_dir), selection.plugin_files, devices=place.devices)
    at = replace(at, executor=executor_named(executor))
    policy, storing = Policy(run_timeout, fail_fast=fail_fast), Storing(text_or_none(store), rerun)
    with own_plugins(objects.plugins), _threads_kept():
        if given:
            selection, asked = _of_spec(given, selection, alone=len(methods) == 1)
            read = single()
        else:
            read, asked = plan.requested(selection, screen, storing.store, text_or_none(storage))
            check_published(read, published_folder(None))
        carried = carry_out(selection, read, asked, at, place, policy, storing, screen)
        report(carried.failures, carried.uri, carried.recorded)
    if carried.stopped is not None:
        raise carried.stopped
    return Results(carried.uri, selection.suite or read.name, specs=carried.specs, settings=at, plugins=objects.plugins)


def _of_spec(given: Sequence[RunSpec], asked: Selection, *, alone: bool) -> tuple[Selection, list[RunSpec]]:
    """The run that is fully described, with each of the seeds, and the selection that comes to it as well."""
    if not alone or asked.suite or asked.sets or asked.scale or asked.settings or asked.tuned:
        raise FedbenchError(
            "a RunSpec says all there is to say of a run: give it alone, with seeds= at most; another one is made by "
            "spec.model_copy(update=...)."
        )
    spec = given[0]
    seeds = asked.seeds or (spec.seed,)
    plain = replace(asked, methods=(spec.method,), seeds=seeds)
    # what is not as it would be without a word
    usual = expand(single(), plain)[0]
    differing = {key: value for key, value in _settings_of(spec).items() if value != _settings_of(usual).get(key)}
    selection = replace(plain, sets=assignments(differing, {}))
    specs = [spec.model_copy(update={"seed": seed}) for seed in seeds]
    if [one.run_id for one in expand(single(), selection)] != [one.run_id for one in specs]:
        raise FedbenchError(
            f"the RunSpec of {spec.title} can't be written as settings of a run, so no command would repeat it"
            + (f"; give its suite with tuned={spec.tuned!r}." if spec.tuned else ".")
        )
    return selection, specs


def _settings_of(spec: RunSpec) -> dict[str, Any]:
    """Every setting by the name under which ``set=`` takes it."""
    of_run = {name: getattr(spec, name) for name in RUN_KEYS}
    parts = {"scenario": spec.scenario, "training": spec.training}
    of_parts = {
        f"{head}.{name}": getattr(part, name) for head, part in parts.items() for name in type(part).model_fields
    }
    of_methods = {f"{method}.{name}": value for method, own in spec.params.items() for name, value in own.items()}
    return of_run | of_parts | of_methods


def _place(
    engine: str | None, jobs: int | None, devices: tuple[str, ...], run_timeout: float | None, has_objects: bool
) -> Place:
    """The place of the runs. FedbenchError for what does not go together."""
    place = Place(engine or ("in-process" if has_objects else "processes"), jobs, devices=devices)
    place.check([name for name in ENGINES if name != "ray"])
    if has_objects and (place.engine != "in-process" or run_timeout is not None or (jobs or 1) > 1):
        raise FedbenchError(
            "objects of a program can't be sent to other processes, so their runs go on in this one, one after "
            "another: leave engine, jobs and run_timeout out, or put the objects into a file and give plugins=[FILE]."
        )
    if place.engine == "in-process" and run_timeout is not None:
        raise FedbenchError("a run in this process can't be ended; leave run_timeout or engine='in-process' out.")
    return place


@contextmanager
def _threads_kept() -> Iterator[None]:
    """What a run in this process sets torch's threads to ends with it."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)

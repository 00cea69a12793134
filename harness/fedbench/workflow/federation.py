"""Who holds what before anything is trained: ``fedbench.federation``, and what ``fedbench scenario show`` tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedbench.core.errors import FedbenchError, raised_at, reason_of
from fedbench.core.federation import Dataset, Federation
from fedbench.core.spec import RunSpec, stack_names
from fedbench.kinds.registry import find_method, own_plugins, plugins_everywhere
from fedbench.scenarios import build_federation
from fedbench.suites.expand import expand
from fedbench.suites.resolve import section_of
from fedbench.suites.suite import load_suite, single
from fedbench.workflow.asking import Folder, Sets, assignments, files, folders, numbers
from fedbench.workflow.own import OwnObjects
from fedbench.workflow.selection import Selection


@dataclass(frozen=True)
class Dealt:
    """A data set, and what a scenario makes of it."""

    spec: RunSpec
    """The run of fedavg that has this federation."""
    data: Dataset
    federation: Federation


def federation(
    scenario: str | None = None,
    *,
    dataset: str | Dataset | None = None,
    seed: int = 0,
    suite: str | None = None,
    setting: str = "",
    scale: str = "",
    set: Mapping[str, Any] | None = None,
    plugins: Folder | list[Folder] | None = None,
    data_dir: Folder | None = None,
    cache_dir: Folder | None = None,
    **settings: Any,
) -> pd.DataFrame:
    """How many training samples of which class every client holds: a line a client (its name, where it has one, else
    its number), a column a class. Clients that never train are left out; of data that drift it is the first stretch.

    Scenario, data set and seed give the clients that they give in a run, as ``fedbench scenario show`` tells them.
    By default the scenario is that of ``fedbench.run``; with ``suite`` it is the suite's, of its only setting or the
    one named. Data set and ``partition`` may be a program's own. Raises FedbenchError for a setting that a federation
    does not depend on.
    """
    if scenario is not None and suite is not None:
        raise FedbenchError(f"scenario={scenario!r} and suite={suite!r} are two answers; leave one out.")
    [seed] = numbers((seed,))
    objects, plugin_files = OwnObjects(), files(plugins)
    own = {"dataset": objects.dataset(dataset)}
    sets = assignments(objects.settings(set), own | objects.settings(settings))
    with own_plugins(objects.plugins), plugins_everywhere(plugin_files):
        selection = federation_asked(suite, seed, sets, setting, scale)
        made = deal(scenario, selection, folders(data_dir, cache_dir)).federation
    rows = made.class_table.rows(0, len(made.clients)).tolist()
    held = pd.DataFrame(rows, index=list(made.client_names[: len(rows)]) or None, columns=list(made.classnames))
    return held.rename_axis(index="client", columns="class")


def federation_asked(suite: str | None, seed: int, sets: Sets, setting: str, scale: str) -> Selection:
    """What is asked for, as `fedbench run` would take it of a run of fedavg."""
    for key, _ in sets:
        _refuse_ineffective(key)
    settings = (setting,) if setting else ()
    return Selection(("fedavg",), (seed,), sets, scale=scale, settings=settings, suite=suite)


def deal(scenario: str | None, selection: Selection, folders: tuple[Path, Path]) -> Dealt:
    """Deal the data to the clients: names, values and precedence are those of a run."""
    from fedbench.datasets import load_dataset

    spec = _spec_of(scenario, selection)
    try:
        data = load_dataset(spec.dataset, data_dir=folders[0], cache_dir=folders[1])
    except FedbenchError:
        raise
    except Exception as error:  # whatever a plug-in's code may raise
        what = f"{reason_of(error)} ({raised_at(error)})"
        raise FedbenchError(f"data set {spec.dataset!r} can't be loaded: {what}.") from error
    return Dealt(spec, data, build_federation(data, spec.scenario, spec.seed))


def _spec_of(scenario: str | None, selection: Selection) -> RunSpec:
    if selection.suite is None:
        wanted = single(scenario, None, None)
    else:
        wanted = load_suite(selection.suite)
        # a suite's fedavg row may have settings of its own, or not run everywhere; shown is what every row meets
        others = tuple(row for row in wanted.rows if stack_names(row.method) != ("fedavg",))
        wanted = wanted.model_copy(update={"rows": others})
    specs = expand(wanted, selection)
    if len(specs) > 1 and not specs[0].setting:
        raise FedbenchError("one federation is shown, and several values of a setting make several; give one value.")
    if len(specs) > 1:
        raise FedbenchError(
            f"suite {wanted.name!r} has {len(specs)} settings at scale {specs[0].scale!r}; choose one with --setting: "
            f"{', '.join(repr(spec.setting) for spec in specs)}."
        )
    return specs[0]


def _refuse_ineffective(key: str) -> None:
    """``--set`` of something that a partition doesn't depend on is a mistake, not a no-op."""
    if key == "seed":
        raise FedbenchError("--set seed: the seed is no setting; give --seed.")
    section, field = ("run", key) if key == "method" else section_of(key, ())
    if section == "scenario" or (section, field) == ("run", "dataset"):
        return
    if section == "other-method":
        owner = key.partition(".")[0]
        find_method(owner)  # a name that no method has is a typing error
        raise FedbenchError(f"--set {key}: a partition doesn't depend on {owner}'s own settings; leave it out.")
    raise FedbenchError(
        f"--set {key}: a partition doesn't depend on it, but on the scenario's settings, dataset and --seed alone; "
        "leave it out."
    )

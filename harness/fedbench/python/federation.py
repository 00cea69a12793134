"""``fedbench.federation``: who holds what, before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset
from fedbench.kinds.registry import own_plugins, plugins_everywhere
from fedbench.python.asking import Folder, assignments, files, folders, numbers
from fedbench.python.own import OwnObjects
from fedbench.runs.prepare import Settings, dataset_for
from fedbench.scenarios import build_federation
from fedbench.workflow.federations import federation_overrides, spec_of_federation


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

    Scenario, data set and seed give the clients that they give in a run, as ``fedbench scenario show`` draws them.
    By default the scenario is that of ``fedbench.run``; with ``suite`` it is the suite's, of its only setting or the
    one named. Data set and ``partition`` may be a program's own. Raises FedbenchError for a setting that a federation
    does not depend on.
    """
    if scenario is not None and suite is not None:
        raise FedbenchError(f"scenario={scenario!r} and suite={suite!r} are two answers; leave one out.")
    [seed] = numbers((seed,))
    objects, found = OwnObjects(), files(plugins)
    name, sets = objects.dataset(dataset), assignments(objects.settings(set), objects.settings(settings))
    with own_plugins(objects.plugins), plugins_everywhere(found):
        overrides = federation_overrides(name, seed, sets, setting, scale)
        spec = spec_of_federation(scenario, suite, overrides)
        made = build_federation(dataset_for(spec, Settings(*folders(data_dir, cache_dir), found)), spec.scenario, seed)
    rows = made.class_table.rows(0, len(made.clients)).tolist()
    held = pd.DataFrame(rows, index=list(made.client_names[: len(rows)]) or None, columns=list(made.classnames))
    return held.rename_axis(index="client", columns="class")

"""``fedbench.tune``: studies carried out, recorded and gone on with as by ``fedbench tune``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from fedbench.cli.tuning import trial_line
from fedbench.core.errors import FedbenchError
from fedbench.python.asking import Folder, Names, assignments, files, folders, names, numbers
from fedbench.python.screens import screen_for
from fedbench.runs.prepare import Settings
from fedbench.tuning.studies import Found
from fedbench.workflow.searching import search
from fedbench.workflow.selection import Place, Selection
from fedbench.workflow.studies import Wanted, planned


def tune(
    suite: str,
    *methods: str,
    trials: int = 20,
    objective: Names | None = None,
    seeds: int | Iterable[int] | None = None,
    params: Names | None = None,
    pruner: str = "median",
    validation: float = 0.2,
    study: str = "",
    set: Mapping[str, Any] | None = None,
    scale: str = "",
    setting: Names | None = None,
    plugins: Folder | Iterable[Folder] | None = None,
    store: Folder | None = None,
    storage: Folder | None = None,
    jobs: int | None = None,
    data_dir: Folder | None = None,
    cache_dir: Folder | None = None,
    progress: bool = True,
    **settings: Any,
) -> pd.DataFrame:
    """Tune rows of a suite, with an equal budget for each, and return what was found: a line a row.

    It does what ``fedbench tune`` does, with options of the same names. The columns: ``study``, which
    ``fedbench.run(tuned=...)`` takes, ``row``, for each objective the ``default``, of the suite's own values, and the
    ``best``, then ``improved``, ``trial``, how many trials are ``complete`` and ``pruned``, and a column for each value
    of the best trial. Raises FedbenchError for bad input before anything is run, and where no trial got to its end.
    """
    screen, found = screen_for(progress), files(plugins)
    sets = assignments(set, settings)
    selection = Selection(suite, methods, (0,), sets, found, scale, names(setting))
    wanted = Wanted(trials, names(objective), numbers(seeds), names(params), pruner, validation, study)
    at = Settings(*folders(data_dir, cache_dir), found)
    plan = planned(selection, wanted, at, _text(store), _text(storage), screen)
    place = Place("processes", jobs, "", 1.0, 0.0)
    searched = search(plan, at, place, lambda event: screen.say(trial_line(plan.budget, event).plain))
    if searched is None:
        raise KeyboardInterrupt
    for failure in searched.failures:
        screen.complain(failure.reason)
    if not searched.results:
        raise FedbenchError(f"no trial of the study {plan.name!r} got to its end.")
    return pd.DataFrame([_line(plan.name, result) for result in searched.results])


def _line(study: str, found: Found) -> dict[str, Any]:
    objectives = found.record.budget.objectives
    defaults = found.defaults or [float("nan")] * len(objectives)
    scores: dict[str, float] = {}
    for metric, default, best in zip(objectives, defaults, found.best, strict=True):
        scores |= {f"{metric}_default": default, f"{metric}_best": best}
    counts = {state: found.states.get(state, 0) for state in ("complete", "pruned")}
    row = {"study": study, "row": found.record.title, **scores, "improved": found.improved, "trial": found.trial}
    return {**row, **counts, **found.values}


def _text(given: Folder | None) -> str | None:
    return None if given is None else str(given)

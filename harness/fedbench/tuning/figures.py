"""Figures and tables of a study: importances, the objective against every value, the course of the search."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import optuna
from matplotlib.axes import Axes
from optuna.exceptions import ExperimentalWarning
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from optuna.visualization import matplotlib as drawing

from fedbench.core.files import csv_text, replacing
from fedbench.tuning.objectives import Objective
from fedbench.tuning.studies import Record, record_of

FEWEST = 8
"""Complete trials below which an importance would say nothing."""


def importances(study: optuna.Study) -> dict[str, float]:
    """Share of the first objective's variance that each hyper-parameter explains, largest first; {} for few trials."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < FEWEST or len({trial.values[0] for trial in complete}) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says which sign it takes, which is the one it gets
        return dict(optuna.importance.get_param_importances(study, target=_lower_is_better(study)))


def _lower_is_better(study: optuna.Study) -> Callable[[FrozenTrial], float]:
    """The first objective with the sign that PED-ANOVA takes: it explains what leads to low values."""
    sign = 1.0 if study.directions[0] is StudyDirection.MINIMIZE else -1.0
    return lambda trial: sign * float(trial.values[0])


def write(study: optuna.Study, folder: Path) -> list[Path]:
    """Write ``trials.csv`` and the figures as PNG into a folder that is named after the row; returns the files."""
    record = record_of(study)
    target = folder / re.sub(r"[^\w.=-]+", "-", record.title).strip("-")
    target.mkdir(parents=True, exist_ok=True)
    trials = study.trials_dataframe(attrs=("number", "value", "duration", "params", "user_attrs", "state"))
    # which machine and process ran it is of use while it runs
    trials = trials.drop(columns=["user_attrs_process"], errors="ignore")
    written = [target / "trials.csv"]
    with replacing(written[0], "table of trials", "choose another --output") as temporary:
        temporary.write_text(csv_text(trials), encoding="utf-8")
    if not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        return written
    metrics = record.budget.objectives
    named = f"{metrics[0]} on validation data"
    options: dict[str, Any] = {"target": lambda trial: float(trial.values[0]), "target_name": named}
    figures: dict[str, Callable[[], Any]] = {
        "slices": lambda: drawing.plot_slice(study, **options),
        "history": lambda: drawing.plot_optimization_history(study, **options),
    }
    if importances(study):
        lower = _lower_is_better(study)
        figures["importances"] = lambda: drawing.plot_param_importances(study, target=lower, target_name=named)
    if len(metrics) in (2, 3):
        names = [Objective(metric).metric for metric in metrics]
        figures["pareto"] = lambda: drawing.plot_pareto_front(study, target_names=names)
    for name, draw in figures.items():
        written.append(target / f"{name}.png")
        _save(draw, written[-1], record)
    return written


def _save(draw: Callable[[], Any], path: Path, record: Record) -> None:
    from matplotlib import pyplot

    with warnings.catch_warnings(), matplotlib.rc_context({"figure.constrained_layout.use": True}):
        warnings.simplefilter("ignore", ExperimentalWarning)
        warnings.simplefilter("ignore", UserWarning)
        matplotlib.use("Agg")
        axes = draw()
        figure = axes.figure if hasattr(axes, "figure") else axes.flat[0].figure
        figure.suptitle(record.study_name)
        _name_by_symbol(figure.axes, {str(d["key"]): str(d["symbol"]) for d in record.space})
        width = max(7.5, 2.3 * len(figure.axes))
        figure.set_size_inches(width, 4.8)
        with replacing(path, "figure", "choose another --output") as temporary:
            figure.savefig(temporary, format="png", dpi=110)
        pyplot.close(figure)


def _name_by_symbol(every: Sequence[Axes], symbols: Mapping[str, str]) -> None:
    """Write the papers' symbols beside the keys, on the axes that bear them."""
    named = {key: f"{symbol}  ({key})" for key, symbol in symbols.items() if symbol != key.replace("_", " ")}
    for axes in every:
        # a log axis of less than a decade names its minor ticks, which need room
        axes.tick_params(axis="x", which="minor", labelsize="x-small", labelrotation=60)
        axes.set_xlabel(named.get(axes.get_xlabel(), axes.get_xlabel()))
        keys = [label.get_text() for label in axes.get_yticklabels()]
        if set(keys) & set(symbols):
            axes.set_yticks(axes.get_yticks(), [named.get(key, key) for key in keys])

"""``fedbench.tune``: studies carried out, recorded and gone on with as by ``fedbench tune``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
from rich.text import Text

from fedbench.core.errors import FedbenchError
from fedbench.core.wording import counted
from fedbench.runs.prepare import Settings
from fedbench.tuning.results import StudyResult
from fedbench.tuning.search import Confirmed, TrialBegan, TrialEvent
from fedbench.tuning.studies import Budget
from fedbench.workflow.asking import Folder, Names, assignments, files, folders, names, numbers, text_or_none
from fedbench.workflow.console import clock, megabytes
from fedbench.workflow.screens import CellBar, Notebook, Screen, screen_for
from fedbench.workflow.selection import Place, Selection
from fedbench.workflow.studies import Planned, Wanted, planned, search


def tune(
    suite: str,
    *methods: str,
    trials: int = 20,
    objective: Names | None = None,
    seeds: int | Iterable[int] | None = None,
    confirm: int | None = None,
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
    devices: Names | None = None,
    data_dir: Folder | None = None,
    cache_dir: Folder | None = None,
    progress: bool = True,
    **settings: Any,
) -> pd.DataFrame:
    """Tune rows of a suite, with an equal budget for each, and return what was found: a line a row.

    It does what ``fedbench tune`` does, with options of the same names. The columns: ``study``, which
    ``fedbench.run(tuned=...)`` takes, ``row``, for each objective the ``default``, of the suite's own values, the
    ``best``, of the chosen trial, both on the tuning seeds, and ``confirmed``, of that trial on seeds that chose
    nothing (NaN without such); then ``improved``, ``trial``, how many trials are ``complete`` and ``pruned``, and a
    column for each value of the chosen trial. Trials are shown as they begin and end: a line each, in a notebook a bar.
    Raises FedbenchError for bad input before anything is run, and where no trial got to its end.
    """
    screen, plugin_files = screen_for(progress), files(plugins)
    sets = assignments(set, settings)
    selection = Selection(names(methods), (0,), sets, plugin_files, scale, names(setting), suite=suite)
    wanted = Wanted(trials, names(objective), numbers(seeds), names(params), pruner, validation, study, confirm)
    at = Settings(*folders(data_dir, cache_dir), plugin_files, devices=names(devices))
    place = Place("processes", jobs)
    place.check([place.engine])
    plan = planned(selection, wanted, at, text_or_none(store), text_or_none(storage), screen)
    with _shown(screen, plan) as show:
        searched = search(plan, at, place, show)
    if searched is None:
        raise KeyboardInterrupt
    for failure in searched.failures:
        screen.complain(failure.reason)
    if not searched.results:
        raise FedbenchError(f"no trial of the study {plan.name!r} got to its end.")
    return pd.DataFrame([_line(plan.name, result) for result in searched.results])


@contextmanager
def _shown(screen: Screen, plan: Planned) -> Iterator[Callable[[TrialEvent], None]]:
    """What shows the trials as they begin and end: in a notebook a bar, else a line each."""
    if not isinstance(screen, Notebook):
        yield lambda event: screen.say(trial_line(plan.budget, event).plain)
        return
    view = _NotebookTrials(plan)
    try:
        yield view
    finally:
        view.close()


class _NotebookTrials:
    """A bar with the share of the trials that are over, and a line for every trial on its way."""

    def __init__(self, plan: Planned) -> None:
        self._total = sum(record.budget.trials for _, record in plan.records)
        self._bar, self._began = CellBar(self._total, "trial"), time.monotonic()
        self._over: dict[str, int] = {}
        self._pruned = self._ended_here = 0
        self._under_way: dict[tuple[str, int], str] = {}
        self._draw()

    def __call__(self, event: TrialEvent) -> None:
        """A trial began or ended; the few further runs behind the trials are not shown."""
        if isinstance(event, Confirmed):
            return
        study, title = event.row.study_name, event.row.spec.title
        if isinstance(event, TrialBegan):
            self._under_way[study, event.number] = f"{title}  trial {event.number}  {values_text(event.values)}"
        else:
            self._under_way.pop((study, event.number), None)
            # those of an earlier call count as well
            self._over[study] = event.ended
            self._ended_here += 1
            self._pruned += not event.values
        self._draw()

    def close(self) -> None:
        """The line in place of the bar."""
        pruned = f", {self._pruned} of them pruned" if self._pruned else ""
        self._bar.close(f"{counted(self._ended_here, 'trial')}{pruned} in {clock(time.monotonic() - self._began)}")

    def _draw(self) -> None:
        over, elapsed = sum(self._over.values()), time.monotonic() - self._began
        left = elapsed / self._ended_here * (self._total - over) if self._ended_here else None
        self._bar.draw(over, elapsed, left, self._under_way.values())


def _line(study: str, result: StudyResult) -> dict[str, Any]:
    objectives = result.record.budget.objectives
    defaults = result.defaults or [float("nan")] * len(objectives)
    scores: dict[str, float] = {}
    confirmed = result.confirmed or [float("nan")] * len(objectives)
    for metric, default, best, value in zip(objectives, defaults, result.best, confirmed, strict=True):
        scores |= {f"{metric}_default": default, f"{metric}_best": best, f"{metric}_confirmed": value}
    counts = {state: result.states.get(state, 0) for state in ("complete", "pruned")}
    row = {"study": study, "row": result.record.title, **scores, "improved": result.improved, "trial": result.trial}
    return {**row, **counts, **result.values}


def seeds_text(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def trial_line(budget: Budget, event: TrialEvent) -> Text:
    """What became of a trial."""
    name = f"{event.row.spec.title}  trial {event.number}"
    if isinstance(event, TrialBegan):
        return Text(f"start   {name}  {values_text(event.values)}", "dim")
    shown = objectives_text(budget, event.values) if event.values else event.reason.partition(":")[0][:80]
    style = "green" if event.values else "yellow"
    if isinstance(event, Confirmed):
        return Text.assemble(("done  ", style), f"  {name}  {event.step} on {seeds_text(event.seeds)}: {shown}")
    word = "done  " if event.values else "pruned"
    return Text.assemble((word, style), f"  {name}  {shown}  ({event.ended}/{event.budget})")


def values_text(values: Mapping[str, Any]) -> str:
    """``lr=0.013 clip2fl.beta=2``, to three digits."""
    return " ".join(
        f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
    )


def objectives_text(budget: Budget, values: Sequence[float] | None) -> str:
    """``63.1``, ``63.1 / 1.25 MB``: accuracies in percent, bytes in MB, seconds; ``-`` where there are none."""
    if not values:
        return "-"
    return " / ".join(objective_text(metric, value) for metric, value in zip(budget.objectives, values, strict=True))


def objective_text(metric: str, value: float) -> str:
    is_bytes = metric.startswith("bytes")
    return f"{megabytes(value)} MB" if is_bytes else f"{value:.1f}" + (" s" if "seconds" in metric else "")

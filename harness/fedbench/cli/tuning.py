"""Carrying out ``fedbench tune``: what is searched, the trials as they end, and what they found."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from fedbench.core.wording import counted
from fedbench.runs.prepare import Settings
from fedbench.tracking.databases import masked
from fedbench.tuning.results import StudyResult
from fedbench.tuning.space import Dimension, defaults_of
from fedbench.tuning.studies import Budget, Record
from fedbench.tuning.trial import Tuned
from fedbench.workflow.console import cell, complain, console, resumable, say, table
from fedbench.workflow.selection import Place, Selection, command_line
from fedbench.workflow.studies import Planned, search
from fedbench.workflow.tuning import objective_text, objectives_text, seeds_text, trial_line, values_text
from fedbench_boards.gaps import Gap

FINE, FAILED, INTERRUPTED = 0, 1, 130


def show_space(records: Sequence[tuple[Tuned, Record]]) -> None:
    """The table of ``--dry-run``."""
    budget = records[0][1].budget
    say(f"{_studies(len(records), budget)}: {budget_text(budget)}")
    lines = table("row", "setting searched", "symbol", "from", "to", "scale", "the suite's", right=("from", "to"))
    for row, _ in records:
        current = defaults_of(row.spec, row.space)
        for number, dimension in enumerate(row.space):
            title = "" if number else row.spec.title
            value = current.get(dimension.key, "-")
            lines.add_row(*map(cell, (title, dimension.key, dimension.symbol, *_range(dimension), value)))
    console().print(lines)
    say("Nothing was run or stored.", style="dim")


def _studies(number: int, budget: Budget) -> str:
    return f"{counted(number, 'study', 'studies')} of {counted(budget.trials, 'trial')}"


def _range(dimension: Dimension) -> tuple[str, str, str]:
    if dimension.choices:
        return "", "", " | ".join(map(str, dimension.choices))
    scale = ("log" if dimension.log else "linear") + (", whole" if dimension.whole else "")
    return f"{dimension.low:g}", f"{dimension.high:g}", scale


def budget_text(budget: Budget) -> str:
    """The budget in words."""
    further = [
        *([f"run-off on {seeds_text(budget.runoff)}"] if budget.runoff else []),
        *([f"confirmation on {seeds_text(budget.confirming)}"] if budget.confirming else []),
    ]
    parts = [seeds_text(budget.seeds), f"pruner {budget.pruner}", f"sampler {budget.sampler}", *further]
    return f"{', '.join(budget.objectives)} on {100 * budget.validation:g} % of the training data, {', '.join(parts)}"


def carry_out(planned: Planned, settings: Settings, place: Place) -> int:
    """Open or resume the studies, run their trials, show what they found; the exit code."""
    budget = planned.budget
    with resumable():
        say(f"{_studies(len(planned.records), budget)}: {budget_text(budget)}")
        searched = search(
            planned, settings, place, lambda event: console().print(trial_line(budget, event), soft_wrap=True)
        )
        if searched is None:
            complain("what is finished is kept; the same command goes on.", label="interrupted")
            return INTERRUPTED
        show_found(searched.results)
        for failure in searched.failures:
            complain(failure.reason)
            if failure.details:
                console(stderr=True).print(failure.details, markup=False, soft_wrap=True)
    if not searched.failures:
        return FINE
    return FAILED if any(failure.details for failure in searched.failures) else 2


def show_found(results: Sequence[StudyResult]) -> None:
    """A line a study: the chosen trial on validation data beside the suite's own values, and whether it is better."""
    numbers = ("the suite's", "best", *(["confirmed"] if any(result.confirmed for result in results) else []))
    lines = table("row", "objective", *numbers, "trials", "values", right=numbers)
    for result in results:
        budget = result.record.budget
        cells = [
            result.record.title,
            " / ".join(budget.objectives),
            objectives_text(budget, result.defaults),
            objectives_text(budget, result.best),
            *([objectives_text(budget, result.confirmed)] if "confirmed" in numbers else []),
            ", ".join(f"{count} {state}" for state, count in result.states.items()),
            values_text(result.values) if result.improved is not False else "the suite's",
        ]
        lines.add_row(*map(cell, cells))
    say("")
    console().print(lines)
    say("")
    for result in results:
        if len(result.record.budget.objectives) > 1:
            _show_front(result)
        if result.improved is False:
            say(f"{result.record.title}: no trial was better than the suite's own values, which stay.")
        elif result.improved is None:
            say(f"{result.record.title}: the suite's own values did not get to an end, so there is nothing to compare.")


def _show_front(result: StudyResult) -> None:
    """The trials that none beats in everything; the first is the one that --tuned takes."""
    objectives = result.record.budget.objectives
    lines = table("trial", *objectives, "values", right=("trial", *objectives))
    for number, values, drawn in result.front:
        shown = objectives_text(result.record.budget, values).split(" / ")
        lines.add_row(*map(cell, (number, *shown, values_text(drawn))))
    say(f"{result.record.title}: the Pareto front; --tuned takes trial {result.trial}, --set any other", style="dim")
    console().print(lines)


def show_gaps(every: Sequence[Gap]) -> None:
    """A line a study: validation, confirmation and test of the chosen trial, and validation minus test."""
    numbers = ("validation", "confirmation", "test", "gap")
    lines = table("row", "objective", *numbers, right=numbers)
    for gap in every:
        values = (gap.validation, gap.confirmation, gap.test)
        shown = ["-" if value is None else objective_text(gap.objective, value) for value in values]
        lines.add_row(*map(cell, (gap.row, gap.objective, *shown, "-" if gap.gap is None else f"{gap.gap:+.1f}")))
    console().print(lines)
    say(
        "validation: on the seeds that chose the trial; confirmation: on seeds that chose nothing; test: mean of the "
        "store's runs with --tuned; gap: validation - test, in points",
        style="dim",
    )


def show_next_steps(name: str, selection: Selection, store: str | None, storage: str | None) -> None:
    """What to do with a study."""
    places = {"--store": store, "--storage": storage}
    where = [word for option, value in places.items() if value for word in (option, masked(value))]
    say(f"run it       {command_line('run', replace(selection, seeds=(), tuned=name), *where, paths=True)}")
    say(f"look inside  {shlex.join(['fedbench', 'study', name, *where])}")

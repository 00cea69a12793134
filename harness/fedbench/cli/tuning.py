"""Carrying out ``fedbench tune``: what is searched, the trials as they end, and what they found."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from rich.text import Text

from fedbench.cli.console import cell, complain, console, megabytes, resumable, say, table
from fedbench.cli.options import Place, Selection, command_line
from fedbench.core.wording import counted
from fedbench.runs.engines.scheduler import default_workers
from fedbench.runs.prepare import Settings
from fedbench.tuning.space import Dimension, defaults_of
from fedbench.tuning.storage import open_storage
from fedbench.tuning.studies import Budget, Found, Record, found, open_study
from fedbench.tuning.tracking import TrialTracking
from fedbench.tuning.trial import Tuned
from fedbench.tuning.worker import Event, Job, TrialBegan, TrialEnded, WorkerFailed, tune

FINE, FAILED, INTERRUPTED = 0, 1, 130


def show_space(records: Sequence[tuple[Tuned, Record]]) -> None:
    """The table of ``--dry-run``."""
    budget = records[0][1].budget
    say(f"{_studies(len(records), budget)}: {budget_text(budget)}")
    made = table("row", "setting searched", "symbol", "from", "to", "scale", "the suite's", right=("from", "to"))
    for row, _ in records:
        before = ""
        current = defaults_of(row.spec, row.space)
        for dimension in row.space:
            title = "" if row.spec.title == before else row.spec.title
            before = row.spec.title
            made.add_row(
                *map(
                    cell,
                    (title, dimension.key, dimension.symbol, *_range(dimension), current.get(dimension.key, "-")),
                )
            )
    console().print(made)
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
    seeds = f"seed{'s' if len(budget.seeds) > 1 else ''} {', '.join(map(str, budget.seeds))}"
    return (
        f"{', '.join(budget.objectives)} on {100 * budget.validation:g} % of the training data, {seeds}, "
        f"pruner {budget.pruner}, sampler {budget.sampler}"
    )


def carry_out(
    databases: tuple[str, str], records: Sequence[tuple[Tuned, Record]], settings: Settings, place: Place
) -> int:
    """Open or resume the studies, run their trials, show what they found; the exit code.

    ``databases`` are the URLs of the studies' and of the runs'.
    """
    url, uri = databases
    if place.engine != "ray":
        return _carry_out(url, uri, records, settings, place.workers or default_workers(), tune)
    from fedbench.runs.engines.ray.cluster import check_device
    from fedbench.runs.engines.ray.nodes import RayNodes
    from fedbench.tuning.on_ray import check_reach, tune_on

    for row, _ in records:
        check_device(row.spec, place.run_gpus)
    with RayNodes(place.ray_address, place.run_cpus, place.run_gpus, place.workers, settings.plugin_files) as nodes:
        check_reach(nodes, url, uri)
        return _carry_out(url, uri, records, settings, nodes.room(), partial(tune_on, nodes, place.run_cpus))


@resumable()
def _carry_out(
    url: str,
    uri: str,
    records: Sequence[tuple[Tuned, Record]],
    settings: Settings,
    workers: int,
    start: Callable[[Job, int], Generator[Event, None, None]],
) -> int:
    storage = open_storage(url, create=True)
    studies = [open_study(storage, record, defaults_of(row.spec, row.space)) for row, record in records]
    tracking = TrialTracking(uri, records[0][1].suite)
    rows, budget = tuple(row for row, _ in records), records[0][1].budget
    say(f"{_studies(len(rows), budget)}: {budget_text(budget)}")
    job = Job(url, rows, settings, records[0][1].suite, uri)
    failures = []
    try:
        with closing(start(job, min(workers, sum(record.budget.trials for _, record in records)))) as events:
            for event in events:
                if isinstance(event, WorkerFailed):
                    failures.append(event)
                else:
                    _show(event, budget)
    except KeyboardInterrupt:
        complain("what is finished is kept; the same command goes on.", label="interrupted")
        return INTERRUPTED
    results = [result for result in map(found, studies) if result is not None]
    for study in studies:
        tracking.finished(study)
    show_found(results)
    if len(results) < len(studies):
        failures.append(WorkerFailed(f"{len(studies) - len(results)} of the rows have no finished trial."))
    for failure in failures:
        complain(failure.reason)
        if failure.details:
            console(stderr=True).print(failure.details, markup=False, soft_wrap=True)
    if not failures:
        return FINE
    return FAILED if any(failure.details for failure in failures) else 2


def _show(event: TrialBegan | TrialEnded, budget: Budget) -> None:
    if isinstance(event, TrialBegan):
        line = Text(f"start   {event.row.spec.title}  trial {event.number}  {values_text(event.values)}", "dim")
    elif event.values:
        line = Text.assemble(
            ("done  ", "green"),
            f"  {event.row.spec.title}  trial {event.number}  ",
            objectives_text(budget, event.values),
            f"  ({event.ended}/{event.budget})",
        )
    else:
        line = Text.assemble(
            ("pruned", "yellow"),
            f"  {event.row.spec.title}  trial {event.number}  {event.reason.partition(':')[0][:80]}",
            f"  ({event.ended}/{event.budget})",
        )
    console().print(line, soft_wrap=True)


def values_text(values: Mapping[str, Any]) -> str:
    """``lr=0.013 clip2fl.beta=2``, to three digits."""
    return " ".join(
        f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
    )


def objectives_text(budget: Budget, values: Sequence[float]) -> str:
    """``63.1``, ``63.1 / 1.25 MB``: accuracies in percent, bytes in MB, seconds."""
    shown = []
    for metric, value in zip(budget.objectives, values, strict=True):
        is_bytes = metric.startswith("bytes")
        shown.append(f"{megabytes(value)} MB" if is_bytes else f"{value:.1f}" + (" s" if "seconds" in metric else ""))
    return " / ".join(shown)


def show_found(results: Sequence[Found]) -> None:
    """A line a study: the best on validation data beside the suite's own values, and whether it is better."""
    made = table("row", "objective", "the suite's", "best", "trials", "values", right=("the suite's", "best"))
    for result in results:
        budget = result.record.budget
        before = "-" if result.defaults is None else objectives_text(budget, result.defaults)
        trials = ", ".join(f"{count} {state}" for state, count in result.states.items())
        values = values_text(result.values) if result.improved is not False else "the suite's"
        made.add_row(
            *map(
                cell,
                (
                    result.record.title,
                    " / ".join(budget.objectives),
                    before,
                    objectives_text(budget, result.best),
                    trials,
                    values,
                ),
            )
        )
    say("")
    console().print(made)
    say("")
    for result in results:
        if len(result.record.budget.objectives) > 1:
            _show_front(result)
        if result.improved is False:
            say(f"{result.record.title}: no trial was better than the suite's own values, which stay.")
        elif result.improved is None:
            say(f"{result.record.title}: the suite's own values did not get to an end, so there is nothing to compare.")


def _show_front(result: Found) -> None:
    """The trials that none beats in everything; the first is the one that --tuned takes."""
    objectives = result.record.budget.objectives
    made = table("trial", *objectives, "values", right=("trial", *objectives))
    for number, values, drawn in result.front:
        shown = objectives_text(result.record.budget, values).split(" / ")
        made.add_row(*map(cell, (number, *shown, values_text(drawn))))
    say(f"{result.record.title}: the Pareto front; --tuned takes trial {result.trial}, --set any other", style="dim")
    console().print(made)


def show_next_steps(name: str, selection: Selection, store: str | None, storage: str | None) -> None:
    """What to do with a study."""
    given = {"--store": store, "--storage": storage}
    where = [word for option, value in given.items() if value for word in (option, value)]
    say(f"run it       {command_line('run', replace(selection, seeds=(), tuned=name), *where, paths=True)}")
    say(f"look inside  {shlex.join(['fedbench', 'study', name, *where])}")

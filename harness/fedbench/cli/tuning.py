"""Carrying out ``fedbench tune``: what is searched, the trials as they end, and what they found."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from rich.text import Text

from fedbench.cli import plan
from fedbench.cli.console import cell, complain, console, megabytes, resumable, say, table
from fedbench.cli.options import Request, command_line
from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.core.wording import counted
from fedbench.plugins.provenance import commit, versions
from fedbench.plugins.run_code import Codes
from fedbench.runs.job import run_rounds
from fedbench.runs.prepare import Settings
from fedbench.suites.suite import Suite
from fedbench.tracking.store import METHOD_CODE
from fedbench.tracking.tags import code_tags
from fedbench.tuning.objectives import Objective
from fedbench.tuning.space import Dimension, defaults_of, restricted, space_of
from fedbench.tuning.storage import open_storage
from fedbench.tuning.studies import Budget, Found, Record, found, open_study
from fedbench.tuning.tracking import TrialTracking
from fedbench.tuning.trial import Tuned, trial_specs
from fedbench.tuning.worker import Event, Job, TrialBegan, TrialEnded, WorkerFailed, tune

FINE, FAILED, INTERRUPTED = 0, 1, 130


def unused_seed(suite: Suite) -> int:
    """The first seed above all that the suite's runs have, so that nothing is tuned to their luck."""
    scales = (seed for scale in suite.scales.values() for seed in scale.seeds)
    return max([*suite.seeds, *scales]) + 1


def records_of(
    name: str,
    suite: Suite,
    specs: Sequence[RunSpec],
    budget: Budget,
    settings: Settings,
    command: str,
    only: Collection[str],
) -> tuple[list[tuple[Tuned, Record]], bool]:
    """The rows to tune, each with what will be written down of it, and whether the method of another one fails.

    Prepares a run of each, so that what is missing or does not fit shows before anything is trained. Rows without
    anything to train, or to search, or whose method fails, are named and left out. Raises FedbenchError where none is
    left.
    """
    titles = [spec.title for spec in specs]
    for title in titles:
        if titles.count(title) > 1:
            raise FedbenchError(f"two rows are called {title!r}; give one a label in the suite file, or leave one out.")
    trials = [run for spec in specs for run in trial_specs(spec, {}, budget)]
    # every seed, since not every one can be dealt
    rows, failed = plan.plan(suite, trials, settings, every_seed=True)
    infos = {run.run_id: row.info for row in rows for run in row.specs}
    reasons = {run.run_id: row.reason for row in failed for run in row.specs}
    for spec in specs:
        told = [reasons[run.run_id] for run in trial_specs(spec, {}, budget) if run.run_id in reasons]
        if told:
            complain(f"{spec.title}: {told[0]}; it is not tuned", label="failed")
    specs = [spec for spec in specs if all(run.run_id in infos for run in trial_specs(spec, {}, budget))]
    planned = [infos[trial_specs(spec, {}, budget)[0].run_id] for spec in specs]
    _check_objectives(specs, budget, settings)
    spaces = [space_of(spec, settings.plugin_files) for spec in specs]
    trainable = [bool(info.trainable_parameters) for info in planned]
    kept = restricted([space if trains else () for space, trains in zip(spaces, trainable, strict=True)], only)
    codes = Codes(settings.plugin_files)
    chosen = []
    for spec, space, info in zip(specs, kept, planned, strict=True):
        if not space:
            say(f"{spec.title}: nothing to tune", style="dim")
            continue
        code = codes.of(spec.method)
        record = Record(
            name=name,
            suite=suite.name,
            scale=spec.scale,
            setting=spec.setting,
            row=spec.row,
            title=spec.title,
            spec=spec.model_copy(update={"seed": 0}).model_dump(mode="json"),
            space=tuple(dimension.as_json() for dimension in space),
            budget=budget,
            code_hash=code.hash,
            data_hash=info.data_hash,
            weights_hash=info.weights_hash,
            commit=commit(),
            command=command,
            versions=versions(),
            method_code=code_tags(code)[METHOD_CODE],
        )
        chosen.append((Tuned(spec, space, record.study_name), record))
    if not chosen:
        raise FedbenchError("none of these rows has anything to tune; choose others with --method.")
    return chosen, bool(failed)


def _check_objectives(specs: Sequence[RunSpec], budget: Budget, settings: Settings) -> None:
    """Raise FedbenchError for an objective that some setting's runs don't have, told by their round 0."""
    for spec in {spec.setting: spec for spec in specs}.values():
        first = run_rounds(trial_specs(spec, {}, budget)[0], settings)
        metrics = next(first).metrics
        first.close()
        for metric in budget.objectives:
            Objective(metric).check(metrics)


def show_space(records: Sequence[tuple[Tuned, Record]]) -> None:
    """The table of ``--dry-run``."""
    budget = records[0][1].budget
    say(f"{_studies(len(records), budget)}: {told_budget(budget)}")
    made = table("row", "setting searched", "symbol", "from", "to", "scale", "the suite's", right=("from", "to"))
    for row, _ in records:
        before = ""
        current = defaults_of(row.spec, row.space)
        for dimension in row.space:
            title = "" if row.spec.title == before else row.spec.title
            before = row.spec.title
            made.add_row(
                *map(cell, (title, dimension.key, dimension.symbol, *_told(dimension), current.get(dimension.key, "-")))
            )
    console().print(made)
    say("Nothing was run or stored.", style="dim")


def _studies(number: int, budget: Budget) -> str:
    return f"{counted(number, 'study', 'studies')} of {counted(budget.trials, 'trial')}"


def _told(dimension: Dimension) -> tuple[str, str, str]:
    if dimension.choices:
        return "", "", " | ".join(map(str, dimension.choices))
    scale = ("log" if dimension.log else "linear") + (", whole" if dimension.whole else "")
    return f"{dimension.low:g}", f"{dimension.high:g}", scale


def told_budget(budget: Budget) -> str:
    """The budget in words."""
    seeds = f"seed{'s' if len(budget.seeds) > 1 else ''} {', '.join(map(str, budget.seeds))}"
    return (
        f"{', '.join(budget.objectives)} on {100 * budget.validation:g} % of the training data, {seeds}, "
        f"pruner {budget.pruner}, sampler {budget.sampler}"
    )


@resumable()
def carry_out(
    url: str,
    uri: str,
    records: Sequence[tuple[Tuned, Record]],
    settings: Settings,
    workers: int,
    start: Callable[[Job, int], Generator[Event, None, None]] = tune,
) -> int:
    """Open or go on with the studies, run their trials, show what they found; the exit code.

    ``start`` has a job carried out by so many workers.
    """
    storage = open_storage(url, create=True)
    studies = [open_study(storage, record, defaults_of(row.spec, row.space)) for row, record in records]
    tracking = TrialTracking(uri, records[0][1].suite)
    rows, budget = tuple(row for row, _ in records), records[0][1].budget
    say(f"{_studies(len(rows), budget)}: {told_budget(budget)}")
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
        line = Text(f"start   {event.row.spec.title}  trial {event.number}  {told_values(event.values)}", "dim")
    elif event.values:
        line = Text.assemble(
            ("done  ", "green"),
            f"  {event.row.spec.title}  trial {event.number}  ",
            told_objectives(budget, event.values),
            f"  ({event.ended}/{event.budget})",
        )
    else:
        line = Text.assemble(
            ("pruned", "yellow"),
            f"  {event.row.spec.title}  trial {event.number}  {event.reason.partition(':')[0][:80]}",
            f"  ({event.ended}/{event.budget})",
        )
    console().print(line, soft_wrap=True)


def told_values(values: Mapping[str, Any]) -> str:
    """``lr=0.013 clip2fl.beta=2``, to three digits."""
    return " ".join(
        f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
    )


def told_objectives(budget: Budget, values: Sequence[float]) -> str:
    """``63.1``, ``63.1 / 1.25 MB``: accuracies in percent, bytes in MB, seconds."""
    told = []
    for metric, value in zip(budget.objectives, values, strict=True):
        is_bytes = metric.startswith("bytes")
        told.append(f"{megabytes(value)} MB" if is_bytes else f"{value:.1f}" + (" s" if "seconds" in metric else ""))
    return " / ".join(told)


def show_found(results: Sequence[Found]) -> None:
    """A line a study: the best on validation data beside the suite's own values, and whether it is better."""
    made = table("row", "objective", "the suite's", "best", "trials", "values", right=("the suite's", "best"))
    for result in results:
        budget = result.record.budget
        before = "-" if result.defaults is None else told_objectives(budget, result.defaults)
        trials = ", ".join(f"{count} {state}" for state, count in result.states.items())
        values = told_values(result.values) if result.improved is not False else "the suite's"
        made.add_row(
            *map(
                cell,
                (
                    result.record.title,
                    " / ".join(budget.objectives),
                    before,
                    told_objectives(budget, result.best),
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
        told = told_objectives(result.record.budget, values).split(" / ")
        made.add_row(*map(cell, (number, *told, told_values(drawn))))
    say(f"{result.record.title}: the Pareto front; --tuned takes trial {result.trial}, --set any other", style="dim")
    console().print(made)


def show_next_steps(name: str, request: Request, storage: str | None) -> None:
    """What to do with a study."""
    given = {"--store": request.store, "--storage": storage}
    where = [word for option, value in given.items() if value for word in (option, value)]
    say(f"run it       {command_line('run', replace(request, seeds=(), tuned=name), *where, paths=True)}")
    say(f"look inside  {shlex.join(['fedbench', 'study', name, *where])}")

"""Studies: their conditions and rows, checked before anything is trained; and carrying them out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from optuna.study import Study

from fedbench.core.errors import FedbenchError
from fedbench.core.records import RunInfo
from fedbench.core.spec import RunSpec
from fedbench.plugins.provenance import Codes, commit, versions
from fedbench.runs.engines.cards import cards_for
from fedbench.runs.engines.engine import Processes, execute
from fedbench.runs.engines.events import RoundFinished, RunFailed
from fedbench.runs.job import run_rounds
from fedbench.runs.prepare import Settings
from fedbench.suites.suite import Suite
from fedbench.tracking.recording import StoreUnavailable
from fedbench.tracking.schema import METHOD_CODE, store_uri
from fedbench.tracking.tags import code_tags
from fedbench.tuning.objectives import Objective
from fedbench.tuning.results import StudyResult, due, result_of
from fedbench.tuning.search import Search, SearchFailed, TrialEvent
from fedbench.tuning.space import defaults_of, restricted, space_of
from fedbench.tuning.storage import open_storage, storage_url
from fedbench.tuning.studies import Budget, Record, open_study
from fedbench.tuning.tracking import TrialTracking
from fedbench.tuning.trial import PRUNERS, Tuned, trial_specs
from fedbench.workflow import plan
from fedbench.workflow.console import complain
from fedbench.workflow.execution import engine_of
from fedbench.workflow.screens import Screen
from fedbench.workflow.selection import Place, Selection, command_line, words_of

SEEDS = 3
"""On which trials run by default: what is best on one seed need not be on others."""


@dataclass(frozen=True)
class Wanted:
    """What is requested of studies; the suite decides what is empty."""

    trials: int = 20
    objectives: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    only: tuple[str, ...] = ()
    """Keys of what is searched."""
    pruner: str = "median"
    validation: float = 0.2
    study: str = ""
    """Their name."""
    confirm: int | None = None
    """Seeds of the run-off, and as many of the confirmation; None: 1, and 0 for trials of a single seed."""


@dataclass(frozen=True)
class Planned:
    """Studies to be carried out."""

    name: str
    databases: tuple[str, str]
    """The URLs of the studies' and of the runs'."""
    records: list[tuple[Tuned, Record]]
    """The rows with what will be written down of each."""
    has_failed: bool
    """Whether the method of another row fails."""

    @property
    def budget(self) -> Budget:
        """That of every study."""
        return self.records[0][1].budget


def planned(
    selection: Selection, wanted: Wanted, settings: Settings, store: str | None, storage: str | None, screen: Screen
) -> Planned:
    """The studies of the rows that are selected. Bad input raises FedbenchError before anything is run.

    Rows without anything to train, or to search, or whose method fails, are named and left out.
    """
    suite, specs = plan.requested(selection, screen)
    budget = budget_of(suite, specs, selection.assignments, wanted, screen)
    uri = store_uri(store)
    url = storage_url(storage, uri)
    if url == uri:
        raise FedbenchError(
            "--storage and --store are the same database, in which the tables of studies and of runs would clash; give "
            "studies one of their own."
        )
    # a data set may have picked another scale than the first
    scale = selection.scale or (specs[0].scale if specs[0].scale != next(iter(suite.scales), "") else "")
    name = wanted.study or suite.name + (f"-{scale}" if scale else "")
    fitting, has_failed = _fitting(suite, specs, budget, settings, screen)
    _check_objectives([spec for spec, _ in fitting], budget, settings)
    spaces = [space_of(spec, settings.plugin_files) if info.trainable_parameters else () for spec, info in fitting]
    codes, command = Codes(settings.plugin_files), _command(selection, budget, name, wanted)
    records = []
    for (spec, info), space in zip(fitting, restricted(spaces, wanted.only), strict=True):
        if not space:
            screen.say(f"{spec.title}: nothing to tune", style="dim")
            continue
        code = codes.of_run(spec)
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
        records.append((Tuned(spec, space, record.study_name), record))
    if not records:
        raise FedbenchError("none of these rows has anything to tune; choose others with --method.")
    return Planned(name, (url, uri), records, has_failed)


def budget_of(suite: Suite, specs: Sequence[RunSpec], sets: Sequence[str], wanted: Wanted, screen: Screen) -> Budget:
    """The conditions of every study. Raises FedbenchError for those that do not fit, or have no effect."""
    objectives, pruner = wanted.objectives, wanted.pruner
    if not isinstance(wanted.trials, int) or wanted.trials < 1:
        raise FedbenchError(f"{wanted.trials!r} trials are none to carry out; give a whole number from 1 on.")
    if not isinstance(wanted.validation, float) or not 0.01 <= wanted.validation <= 0.9:
        raise FedbenchError(f"validation {wanted.validation!r} is no share from 0.01 to 0.9 of the training data.")
    if pruner not in PRUNERS:
        raise FedbenchError(f"--pruner {pruner!r} is not one of {', '.join(PRUNERS)}.")
    metrics = tuple(objectives or [suite.objective or suite.headline])
    if not objectives and metrics == ("global_accuracy",) and any(s.scenario.imbalance == "natural" for s in specs):
        screen.say(
            "the validation split has the data's own tail, so that all classes count alike: balanced_accuracy",
            style="dim",
        )
        metrics = ("balanced_accuracy",)
    names = [name.removesuffix("_accuracy") for name in metrics]
    if len(set(names)) < len(names) or "" in names:
        raise FedbenchError(f"--objective {' '.join(metrics)}: every objective must have a name, and stand once.")
    for key in (text.partition("=")[0].strip() for text in sets):
        if key.rpartition(".")[2] in ("validation", "finetune_epochs"):
            raise FedbenchError(f"--set {key} has no effect on trials; leave it out (the share is --validation).")
    for spec in specs:
        if not spec.training.rounds:
            raise FedbenchError(f"{spec.title} has no rounds to tune; set rounds above 0.")
    if len(metrics) > 1 and pruner != "none":
        screen.say("several objectives: no trial is pruned, since none is hopeless by one of them alone", style="dim")
        pruner = "none"
    of_trials = tuple(sorted(set(wanted.seeds or unused_seeds(suite, SEEDS))))
    each = wanted.confirm if wanted.confirm is not None else int(len(of_trials) > 1)
    if isinstance(each, bool) or not isinstance(each, int) or each < 0:
        raise FedbenchError(f"confirm {wanted.confirm!r} is no number of seeds; give a whole number from 0 on.")
    further = unused_seeds(suite, 2 * each, of_trials)
    budget = Budget(wanted.trials, of_trials, metrics, pruner, validation=wanted.validation)
    return replace(budget, runoff=further[:each], confirming=further[each:])


def unused_seeds(suite: Suite, number: int, taken: Collection[int] = ()) -> tuple[int, ...]:
    """The first ``number`` seeds above all ``taken`` and all of the suite's runs, so that none is tuned to its luck."""
    scales = (seed for scale in suite.scales.values() for seed in scale.seeds)
    first = max([*suite.seeds, *scales, *taken]) + 1
    return tuple(range(first, first + number))


def _fitting(
    suite: Suite, specs: Sequence[RunSpec], budget: Budget, settings: Settings, screen: Screen
) -> tuple[list[tuple[RunSpec, RunInfo]], bool]:
    """The rows whose runs can all be prepared, with what that shows of the first; whether another's method fails."""
    titles = [spec.title for spec in specs]
    for title in titles:
        if titles.count(title) > 1:
            raise FedbenchError(f"two rows are called {title!r}; give one a label in the suite file, or leave one out.")
    # every seed, since not every one can be partitioned
    of_all = replace(budget, seeds=budget.every_seed)
    runs = {spec.title: trial_specs(spec, {}, of_all) for spec in specs}
    prepared = plan.plan(suite, [run for row in runs.values() for run in row], settings, screen, every_seed=True)
    infos = {run.run_id: row.info for row in prepared.rows for run in row.specs}
    reasons = {run.run_id: row.reason for row in prepared.failed for run in row.specs}
    fitting = []
    for spec in specs:
        failed = [reasons[run.run_id] for run in runs[spec.title] if run.run_id in reasons]
        if failed:
            screen.complain(f"{spec.title}: {failed[0]}; it is not tuned", label="failed")
        elif all(run.run_id in infos for run in runs[spec.title]):
            fitting.append((spec, infos[runs[spec.title][0].run_id]))
    return fitting, bool(reasons)


def _command(selection: Selection, budget: Budget, name: str, wanted: Wanted) -> str:
    """The command that makes the same studies."""
    options: dict[str, Sequence[object]] = {
        "--trials": [str(budget.trials)],
        "--objective": wanted.objectives,
        "--param": wanted.only,
        "--pruner": [wanted.pruner],
        "--validation": [f"{budget.validation:g}"],
        "--confirm": [str(len(budget.confirming))],
        "--study": [name],
    }
    return command_line("tune", replace(selection, seeds=budget.seeds), *words_of(options))


def _check_objectives(specs: Sequence[RunSpec], budget: Budget, settings: Settings) -> None:
    """Raise FedbenchError for an objective that some setting's runs don't have in their round 0."""
    for spec in {spec.setting: spec for spec in specs}.values():
        metrics = _first_metrics(trial_specs(spec, {}, budget)[0], settings)
        for metric in budget.objectives:
            Objective(metric).check(metrics)


def _first_metrics(spec: RunSpec, settings: Settings) -> Mapping[str, float]:
    """The metrics of the run's round 0; in a worker if it is on a card, of which this process takes no memory."""
    if not spec.device.startswith("cuda"):
        with closing(run_rounds(spec, settings)) as rounds:
            return next(rounds).metrics
    engine = Processes(settings, 1, cards=cards_for([spec], settings.devices))
    with closing(execute([spec], settings, 1, engine=engine)) as events:
        first = next(event for event in events if isinstance(event, RoundFinished | RunFailed))
    if isinstance(first, RunFailed):
        raise FedbenchError(f"{spec.title}: {first.reason}")
    return first.record.metrics


@dataclass(frozen=True)
class Searched:
    """What became of studies."""

    results: tuple[StudyResult, ...]
    failures: tuple[SearchFailed, ...]
    """What stopped the search, and that rows are without a result."""


def search(
    planned: Planned, settings: Settings, place: Place, on_event: Callable[[TrialEvent], None]
) -> Searched | None:
    """Open or resume the studies and run their trials; None where Ctrl-C stopped it, which leaves what is finished."""
    (url, uri), records, failures = planned.databases, planned.records, []
    with closing(engine_of(place, settings, [row.spec for row, _ in records])) as engine:
        storage = open_storage(url, create=True)
        studies = [open_study(storage, record, defaults_of(row.spec, row.space)) for row, record in records]
        tracking = TrialTracking(uri, records[0][1].suite, partial(complain, label="warning"))
        try:
            Search(url, [row for row, _ in records], engine, tracking, on_event).carry_out()
        except KeyboardInterrupt:
            return None
        except SearchFailed as failed:
            failures.append(failed)
    results = tuple(result for result in map(result_of, studies) if result is not None)
    try:
        for study in studies:
            tracking.finished(study, "FINISHED" if not failures or _is_over(study) else "FAILED")
    except StoreUnavailable as error:
        failures.append(SearchFailed(str(error)))
    if len(results) < len(studies):
        failures.append(SearchFailed(f"{len(studies) - len(results)} of the rows have no finished trial."))
    return Searched(results, tuple(failures))


def _is_over(study: Study) -> bool:
    result = result_of(study)
    return result is not None and result.spent >= result.record.budget.trials and not due(study)

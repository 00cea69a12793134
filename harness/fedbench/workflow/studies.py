"""What tuning is to search: conditions, rows and their studies, checked before anything is trained."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.plugins.provenance import commit, versions
from fedbench.plugins.run_code import Codes
from fedbench.runs.job import run_rounds
from fedbench.runs.prepare import Settings
from fedbench.suites.suite import Suite
from fedbench.tracking.schema import METHOD_CODE, store_uri
from fedbench.tracking.tags import code_tags
from fedbench.tuning.objectives import Objective
from fedbench.tuning.space import restricted, space_of
from fedbench.tuning.storage import storage_url
from fedbench.tuning.studies import Budget, Record
from fedbench.tuning.trial import PRUNERS, Tuned, trial_specs
from fedbench.workflow import plan
from fedbench.workflow.screens import Screen
from fedbench.workflow.selection import Selection, command_line

SEEDS = 3
"""On which trials run by default: what is best on one seed need not be on others."""


@dataclass(frozen=True)
class Wanted:
    """What is asked of studies; the suite decides what is empty."""

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
    """The studies of the rows that are selected. Bad input raises FedbenchError before anything is run."""
    suite, specs = plan.requested(selection, screen)
    budget = budget_of(suite, specs, selection.assignments, wanted, screen)
    urls = databases(store, storage)
    name = wanted.study or name_of(suite, specs, selection.scale)
    command = command_of(selection, budget, name, wanted)
    return Planned(name, urls, *records_of(name, suite, specs, budget, settings, command, wanted.only, screen))


def budget_of(
    suite: Suite,
    specs: Sequence[RunSpec],
    sets: Sequence[str],
    wanted: Wanted,
    screen: Screen,
) -> Budget:
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


def databases(store: str | None, storage: str | None) -> tuple[str, str]:
    """The URLs of the studies' database and of the store of runs. Raises FedbenchError where they are one."""
    uri = store_uri(store)
    url = storage_url(storage, uri)
    if url == uri:
        raise FedbenchError(
            "--storage and --store are the same database, in which the tables of studies and of runs would clash; give "
            "studies one of their own."
        )
    return url, uri


def name_of(suite: Suite, specs: Sequence[RunSpec], scale: str) -> str:
    """The name of a study without one: the suite's, and the scale where ``scale`` is given or it is not the first."""
    # a data set may have picked another scale than the first
    at = scale or (specs[0].scale if specs[0].scale != next(iter(suite.scales), "") else "")
    return suite.name + (f"-{at}" if at else "")


def command_of(
    selection: Selection,
    budget: Budget,
    name: str,
    wanted: Wanted,
) -> str:
    """The command that makes the same studies."""
    options: dict[str, Sequence[str]] = {
        "--trials": [str(budget.trials)],
        "--objective": wanted.objectives,
        "--param": wanted.only,
        "--pruner": [wanted.pruner],
        "--validation": [f"{budget.validation:g}"],
        "--confirm": [str(len(budget.confirming))],
        "--study": [name],
    }
    words = [word for option, values in options.items() for value in values for word in (option, value)]
    return command_line("tune", replace(selection, seeds=budget.seeds), *words)


def unused_seeds(suite: Suite, number: int, taken: Collection[int] = ()) -> tuple[int, ...]:
    """The first ``number`` seeds above all ``taken`` and all of the suite's runs, so that none is tuned to its luck."""
    scales = (seed for scale in suite.scales.values() for seed in scale.seeds)
    first = max([*suite.seeds, *scales, *taken]) + 1
    return tuple(range(first, first + number))


def records_of(
    name: str,
    suite: Suite,
    specs: Sequence[RunSpec],
    budget: Budget,
    settings: Settings,
    command: str,
    only: Collection[str],
    screen: Screen,
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
    of_all = replace(budget, seeds=budget.every_seed)
    trials = [run for spec in specs for run in trial_specs(spec, {}, of_all)]
    # every seed, since not every one can be partitioned
    found = plan.plan(suite, trials, settings, screen, every_seed=True)
    rows, failed = found.rows, found.failed
    infos = {run.run_id: row.info for row in rows for run in row.specs}
    reasons = {run.run_id: row.reason for row in failed for run in row.specs}
    for spec in specs:
        why = [reasons[run.run_id] for run in trial_specs(spec, {}, of_all) if run.run_id in reasons]
        if why:
            screen.complain(f"{spec.title}: {why[0]}; it is not tuned", label="failed")
    specs = [spec for spec in specs if all(run.run_id in infos for run in trial_specs(spec, {}, of_all))]
    planned = [infos[trial_specs(spec, {}, budget)[0].run_id] for spec in specs]
    _check_objectives(specs, budget, settings)
    spaces = [space_of(spec, settings.plugin_files) for spec in specs]
    trainable = [bool(info.trainable_parameters) for info in planned]
    kept = restricted([space if trains else () for space, trains in zip(spaces, trainable, strict=True)], only)
    codes = Codes(settings.plugin_files)
    chosen = []
    for spec, space, info in zip(specs, kept, planned, strict=True):
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
        chosen.append((Tuned(spec, space, record.study_name), record))
    if not chosen:
        raise FedbenchError("none of these rows has anything to tune; choose others with --method.")
    return chosen, bool(failed)


def _check_objectives(specs: Sequence[RunSpec], budget: Budget, settings: Settings) -> None:
    """Raise FedbenchError for an objective that some setting's runs don't have in their round 0."""
    for spec in {spec.setting: spec for spec in specs}.values():
        first = run_rounds(trial_specs(spec, {}, budget)[0], settings)
        metrics = next(first).metrics
        first.close()
        for metric in budget.objectives:
            Objective(metric).check(metrics)

"""What a study found: the chosen trial, what confirms it, and the runs that have its values.

Each choice is checked on seeds that had no part in it:

1. A trial's value is the mean over the tuning seeds. The best `FINALISTS` trials go on. Their values are optimistic,
   since the luck of these seeds has chosen them.
2. Run-off: every finalist is run on the run-off seeds. The best mean over tuning and run-off seeds is chosen, and is
   what ``--tuned`` takes.
3. Confirmation: the chosen trial is run on the confirming seeds, which have chosen nothing. That value is reported.

These runs see validation data only, as trials do. They are trials of a second Optuna study beside the first, which the
first one's sampler and pruner never see: its trials are the same with and without them. Whatever a stopped command left
out is known from the two studies. More trials may give other finalists; then only what is missing is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
import pandas as pd
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hyper import declared, parse_value
from fedbench.core.spec import RunSpec, Training
from fedbench.kinds.registry import find_method
from fedbench.tuning.objectives import Objective
from fedbench.tuning.space import with_values
from fedbench.tuning.storage import open_storage
from fedbench.tuning.studies import COUNTED, DEFAULTS, PLACE, Record, flat_settings, record_of, studies_named

RECORDED = ("trials", "seeds", "objective", "validation")
"""Columns of a file of values that say how these were found."""
FINALISTS = 3
"""Trials that the run-off is among."""


@dataclass(frozen=True)
class StudyResult:
    """What a study has found so far."""

    record: Record
    values: dict[str, Any]
    """The chosen trial's, by key; with several objectives, of a trial on the Pareto front, by the first one."""
    trial: int
    best: tuple[float, ...]
    """Values of the chosen trial, by objective: means over the tuning seeds, which have chosen it."""
    defaults: tuple[float, ...] | None
    """The same for the suite's own values; None if that trial did not end."""
    states: dict[str, int]
    """How many trials are complete, pruned, running or waiting."""
    improved: bool | None
    """Whether the first objective is better than with the suite's values; None where those got to no end."""
    front: tuple[tuple[int, tuple[float, ...], dict[str, Any]], ...] = ()
    """Number, objectives and values of the trials that none beats in all objectives, the chosen one first."""
    confirmed: tuple[float, ...] | None = None
    """The same for the chosen trial on the confirming seeds, which have chosen nothing; None if it ran on none."""

    @property
    def spent(self) -> int:
        """Trials that are over, of the record's budget."""
        return self.states.get("complete", 0) + self.states.get("pruned", 0)


def result_of(study: optuna.Study) -> StudyResult | None:
    """What ``study`` has found; None as long as no trial has got to its end."""
    record = record_of(study)
    best = chosen(study)
    if best is None:
        return None
    front = [best]
    if len(record.budget.objectives) > 1:
        others = [trial for trial in study.best_trials if trial.number != best.number]
        front += sorted(others, key=lambda trial: (_cost(study, trial.values[0]), trial.number))
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    defaults = next((trial for trial in complete if trial.user_attrs.get(DEFAULTS)), None)
    states = {state.name.lower(): len(study.get_trials(deepcopy=False, states=(state,))) for state in COUNTED}
    return StudyResult(
        record,
        dict(best.params),
        best.number,
        tuple(best.values),
        None if defaults is None else tuple(defaults.values),
        {state: number for state, number in states.items() if number},
        None if defaults is None else _is_improved(study, best, defaults),
        tuple((trial.number, tuple(trial.values), dict(trial.params)) for trial in front),
        _outcomes(study).get(FurtherRun(best.number, "confirmation", record.budget.confirming)) or None,
    )


# --- what is chosen


def finalists(study: optuna.Study) -> list[FrozenTrial]:
    """The best trials by the mean over the tuning seeds, best first; of equals the first, of equal values one.

    With several objectives those of the Pareto front that are best in the first one.
    """
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    candidates = complete if len(study.directions) == 1 else study.best_trials
    distinct = [trial for trial in candidates if "same_as" not in trial.user_attrs]
    return sorted(distinct, key=lambda t: (_cost(study, t.values[0]), t.user_attrs.get(PLACE, t.number)))[:FINALISTS]


def chosen(study: optuna.Study) -> FrozenTrial | None:
    """The best finalist by the mean over tuning and run-off seeds; None as long as no trial is complete.

    As long as the run-off is not over, and where there is none, the best by the tuning seeds.
    """
    best = finalists(study)
    if not best:
        return None
    means = _means(study, best)
    return best[0] if means is None else min(best, key=lambda trial: means[trial.number])


def _means(study: optuna.Study, best: list[FrozenTrial]) -> dict[int, float] | None:
    """Mean of the first objective over tuning and run-off seeds by trial, as a cost; infinite for a trial that failed.

    None as long as the run-off is not over, and where all failed or there is none.
    """
    budget, outcomes = record_of(study).budget, _outcomes(study)
    if not budget.runoff or len(best) < 2:
        return None
    means = {}
    for trial in best:
        outcome = outcomes.get(FurtherRun(trial.number, "run-off", budget.runoff))
        if outcome is None:
            return None
        tuned, further = len(budget.seeds), len(budget.runoff)
        total = tuned * trial.values[0] + further * outcome[0] if outcome else float("inf")
        means[trial.number] = _cost(study, total / (tuned + further)) if outcome else total
    return means if min(means.values()) < float("inf") else None


def _is_improved(study: optuna.Study, best: FrozenTrial, before: FrozenTrial) -> bool:
    """Whether trial ``best`` is better than ``before``: by all seeds that chose, where both were run on them."""
    if best.number == before.number:
        return False
    means = _means(study, finalists(study)) or {}
    if best.number in means and before.number in means:
        return means[best.number] < means[before.number]
    return _cost(study, best.values[0]) < _cost(study, before.values[0])


def _cost(study: optuna.Study, value: float) -> float:
    """``value`` of the first objective with the sign under which less is better."""
    return value if study.directions[0] is StudyDirection.MINIMIZE else -value


# --- runs on further seeds


@dataclass(frozen=True)
class FurtherRun:
    """A trial of a study, by its number, that is to be run on further seeds."""

    number: int
    step: Literal["run-off", "confirmation"]
    seeds: tuple[int, ...]


def open_further(storage: BaseStorage, record: Record) -> optuna.Study | None:
    """The study with the runs on further seeds, created if it is new; None where the budget has none."""
    if not record.budget.runoff and not record.budget.confirming:
        return None
    return optuna.create_study(
        storage=storage,
        study_name=_further_name(record),
        directions=[Objective(metric).direction for metric in record.budget.objectives],
        load_if_exists=True,
        # these trials are measured to their end
        pruner=optuna.pruners.NopPruner(),
    )


def due(study: optuna.Study) -> list[FurtherRun]:
    """What is to be run next of a study whose trials are over, and does neither wait nor run, and is not over."""
    budget, outcomes = record_of(study).budget, _outcomes(study)
    best = finalists(study)
    runs = [FurtherRun(trial.number, "run-off", budget.runoff) for trial in best if budget.runoff and len(best) > 1]
    missing = [run for run in runs if run not in outcomes]
    if not missing and budget.confirming and (choice := chosen(study)) is not None:
        last = FurtherRun(choice.number, "confirmation", budget.confirming)
        missing = [last] if last not in outcomes else []
    begun = [run_of(trial) for trial in _further(study) if not trial.state.is_finished()]
    return [run for run in missing if run not in begun]


def enqueue(further: optuna.Study, run: FurtherRun) -> None:
    """Have ``run`` carried out by whoever asks ``further`` first.

    Two commands that do so at the same moment may both be obeyed, which gives the same numbers twice.
    """
    further.enqueue_trial({}, user_attrs={"of": run.number, "step": run.step, "seeds": list(run.seeds)})


def run_of(trial: optuna.Trial | FrozenTrial) -> FurtherRun | None:
    """What a trial of the second study is for; None for those of the first."""
    attributes = trial.user_attrs
    return FurtherRun(attributes["of"], attributes["step"], tuple(attributes["seeds"])) if "of" in attributes else None


def _outcomes(study: optuna.Study) -> dict[FurtherRun, tuple[float, ...]]:
    """The objectives of the further runs that are over; () for values that do not work there."""
    over = [trial for trial in _further(study) if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    outcomes: dict[FurtherRun, tuple[float, ...]] = {}
    for trial in over:
        run = run_of(trial)
        if run is not None:
            outcomes.setdefault(run, tuple(trial.values) if trial.state is TrialState.COMPLETE else ())
    return outcomes


def _further(study: optuna.Study) -> Sequence[FrozenTrial]:
    try:
        of = study._storage.get_study_id_from_name(_further_name(record_of(study)))
    except KeyError:  # of a budget without further seeds
        return ()
    return study._storage.get_all_trials(of, deepcopy=False)


def _further_name(record: Record) -> str:
    return f"{record.study_name} · further seeds"


# --- runs with the chosen values


def best_of(url: str, name: str) -> dict[str, StudyResult]:
    """What the studies called ``name`` in the database ``url`` found, by setting and row.

    Raises FedbenchError for an unknown name, or studies without a finished trial.
    """
    results = [result_of(study) for study in studies_named(open_storage(url, create=False), name)]
    finished = {result.record.title: result for result in results if result is not None}
    if not finished:
        raise FedbenchError(f"the study {name!r} has no finished trial yet; go on with `fedbench tune`.")
    return finished


def with_best(specs: Sequence[RunSpec], best: Mapping[str, StudyResult], fixed: Sequence[str] = ()) -> list[RunSpec]:
    """The runs with their rows' best values; rows that were not tuned stay as they are.

    Raises FedbenchError where no row was tuned, or one of ``fixed``, the settings of the command line, was.
    """
    if not any(spec.title in best for spec in specs):
        raise FedbenchError(f"none of these rows was tuned; the study has {', '.join(map(repr, sorted(best)))}.")
    return [_tuned(spec, best[spec.title], fixed) if spec.title in best else spec for spec in specs]


def _tuned(spec: RunSpec, result: StudyResult, fixed: Sequence[str]) -> RunSpec:
    record = result.record
    clash = sorted({key.removeprefix("training.") for key in fixed} & set(result.values))
    if clash:
        raise FedbenchError(
            f"--set {clash[0]}: the study {record.name!r} has tuned it for {spec.title!r}; leave it out."
        )
    tuning = {
        "study": record.name,
        "trial": str(result.trial),
        **record.budget.as_tags(),
        "trials": str(result.spent),
        "command": record.command,
    }
    return with_values(spec, result.values).model_copy(update={"tuned": record.name, "tuning": tuning})


def tuned_otherwise(spec: RunSpec, result: StudyResult) -> list[str]:
    """Settings in which the row, as it is run, differs from the row as it was tuned: ``rounds=5``, as it was tuned."""
    before, now = flat_settings(result.record.spec), flat_settings(spec.model_dump(mode="json"))
    searched = {str(dimension["key"]) for dimension in result.record.space}
    ignored = {"seed", "tuned", "device", *searched}
    return [f"{key}={value}" for key, value in before.items() if key not in ignored and now.get(key) != value]


def with_listed(
    specs: Sequence[RunSpec], file: Path, fixed: Sequence[str] = (), plugin_files: tuple[Path, ...] = ()
) -> list[RunSpec]:
    """The runs with the values that a CSV file lists; rows that it does not have stay as they are.

    Its columns are ``setting`` and ``row``, as leaderboards write them, one for each hyper-parameter (``lr``,
    ``fedprox.mu``; an empty cell is the row's own value), and those of `RECORDED`, which say how values were found.
    FedbenchError for another file, for values that --set would refuse, where the file has none of the rows, and for
    ``fixed`` settings that it has too.
    """
    where = f"--tuned {str(file)!r}"
    try:
        table = pd.read_csv(file, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise FedbenchError(f"{where} can't be read: {error}.") from None
    if not {"setting", "row"} <= set(table) or table.duplicated(["setting", "row"]).any():
        raise FedbenchError(f"{where}: it needs the columns setting and row, every pair of them once.")
    keys = [str(name) for name in table if name not in ("setting", "row", *RECORDED)]
    clash = sorted({key.removeprefix("training.") for key in fixed} & set(keys))
    if clash:
        raise FedbenchError(f"--set {clash[0]}: {where} has it too; leave one of them out.")
    lines: list[Any] = table.to_dict("records")
    listed = {(line["setting"], line["row"]): line for line in lines}
    if not any((spec.setting, spec.row) in listed for spec in specs):
        raise FedbenchError(f"{where} has none of these rows; it names them as leaderboards do: setting and row.")
    changed = []
    for spec in specs:
        line = listed.get((spec.setting, spec.row))
        if line is not None:
            texts = {key: line[key] for key in keys if line[key]}
            try:
                with_values(spec, texts)  # no unknown keys
                values = {key: _typed(key, text, plugin_files) for key, text in texts.items()}
            except FedbenchError as error:
                raise FedbenchError(f"{where}, {spec.title!r}: {error}") from None
            tuning = {"study": file.stem} | {key: line[key] for key in RECORDED if line.get(key)}
            spec = with_values(spec, values).model_copy(update={"tuned": file.stem, "tuning": tuning})
        changed.append(spec)
    return changed


def _typed(key: str, text: str, plugin_files: tuple[Path, ...]) -> Any:
    """The value of a method's parameter, or of a field of `Training`, as --set takes it."""
    method, dot, name = key.partition(".")
    if dot:
        return parse_value(key, declared(find_method(method, plugin_files).Params)[name], text)
    try:
        return getattr(Training.model_validate({key: text}), key)
    except ValidationError as error:
        raise FedbenchError(f"{key}={text}: {error.errors()[0]['msg']}.") from None

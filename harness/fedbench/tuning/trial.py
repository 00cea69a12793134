"""One trial of a study: a row with other hyper-parameters, a run for each seed, scored on validation data only.

Each seed draws its own partition, initial weights and validation split. What the pruner sees after a round is the mean
over the seeds: a trial is given up for what it does on all seeds, never for the luck of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, cast

import optuna
from optuna.exceptions import TrialPruned
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState

from fedbench.core.randomness import numpy_generator
from fedbench.core.records import RoundRecord
from fedbench.core.spec import RunSpec
from fedbench.tuning.objectives import Objective
from fedbench.tuning.space import Dimension, draw, with_values
from fedbench.tuning.studies import COUNTED, DRAWN, PLACE, Budget, counted

PRUNERS = ("median", "halving", "none")
_STARTUP = 5
"""Trials before the sampler models and the pruner prunes."""
_DOUBLE = "double"
"""User attribute of a trial that failed because its values were being tried."""


class Surplus(Exception):
    """The budget was spent, or the same values were being tried, when this trial was about to begin."""


@dataclass(frozen=True)
class Tuned:
    """A row of a suite under tuning."""

    spec: RunSpec
    """As the suite has it."""
    space: tuple[Dimension, ...]
    study_name: str


class TrialReports:
    """Hears of a trial's runs, and tells the study the mean over the seeds of each round, whichever run goes on first.

    Its methods raise TrialPruned where the trial is given up: by the study's pruner, or since a run failed.
    """

    def __init__(self, trial: optuna.Trial, budget: Budget) -> None:
        self._trial = trial
        self._objectives = [Objective(metric) for metric in budget.objectives]
        self._by_seed: dict[int, dict[int, Mapping[str, float]]] = {}
        self._last = dict.fromkeys(budget.seeds, -1)
        """The newest round by seed."""
        self._failed: dict[int, str] = {}
        self.by_round: dict[int, dict[str, float]] = {}
        """The means, for whoever records the trial."""

    def round_finished(self, spec: RunSpec, record: RoundRecord) -> None:
        """Report the round once every seed has got here."""
        if record.round == 0:
            for objective in self._objectives:
                objective.check(record.metrics)
        if record.round > self._last[spec.seed]:  # a run whose process died tells its rounds once more
            self._last[spec.seed] = record.round
            if set(record.metrics) - {"train_loss"}:
                self._measured(spec, record)
        self._give_up()

    def run_failed(self, spec: RunSpec, reason: str) -> None:
        """The values of the trial don't work on the run's seed."""
        self._failed[spec.seed] = reason
        self._give_up()

    def _measured(self, spec: RunSpec, record: RoundRecord) -> None:
        by_seed = self._by_seed.setdefault(record.round, {})
        by_seed[spec.seed] = {**record.method_metrics, **record.metrics}
        if len(by_seed) < len(self._last):
            return
        metrics = [by_seed[seed] for seed in self._last]  # in one order, since sums of floats depend on it
        shared = set(metrics[0]).intersection(*metrics[1:])
        means = {name: sum(m[name] for m in metrics) / len(metrics) for name in sorted(shared)}
        self.by_round[record.round] = means
        name = self._objectives[0].name_in(means)
        if len(self._objectives) > 1 or name is None or record.round == 0:
            return
        self._trial.report(means[name], record.round)
        if self._trial.should_prune() and record.round < spec.training.rounds:
            raise TrialPruned(f"pruned at round {record.round}")

    def _give_up(self) -> None:
        """Give up once every seed has got as far as the first that failed.

        What the study hears of the trial, which later ones are modelled on, then depends on no timing.
        """
        if self._failed:
            first = min(self._failed, key=lambda seed: self._last[seed])
            if min(self._last.values()) >= self._last[first]:
                raise TrialPruned(self._failed[first])


def claim(trial: optuna.Trial, row: Tuned, budget: Budget) -> dict[str, Any]:
    """The trial's values by key. Raises Surplus for a trial that has no place in the budget."""
    study = trial.study
    if len(counted(study, before=trial.number)) >= budget.trials:
        raise Surplus(f"the budget of {budget.trials} trials was spent")
    place = _place(trial)
    trial.set_user_attr(PLACE, place)
    failed = study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
    doubles = sum(t.user_attrs.get(PLACE) == place for t in failed if _DOUBLE in t.user_attrs)
    # a sampler of the trial's own: what it draws depends on the earlier trials and its place, on no process's past, and
    # not on its number, which grows with every command that dies
    study.sampler = sampler(budget, place, doubles)
    values = draw(trial, row.space, row.spec)
    trial.set_user_attr(DRAWN, True)
    return values


def _place(trial: optuna.Trial) -> int:
    """The first place that is free for the trial; of one that is tried again, the place that it had."""
    if PLACE in trial.user_attrs:
        return int(trial.user_attrs[PLACE])
    # one look at all of them: other commands take their places at this moment
    trials = counted(trial.study)
    taken = {t.user_attrs[PLACE] for t in trials if PLACE in t.user_attrs}
    earlier = sum(t.number < trial.number and PLACE not in t.user_attrs for t in trials)  # about to take theirs
    return next(islice((place for place in count() if place not in taken), earlier, None))


def twin_of(trial: optuna.Trial) -> FrozenTrial | None:
    """The earlier trial with the same values, whose outcome spares the same runs once more; None without one.

    Raises Surplus while that one runs, and for a trial that was queued (the suite's own values): queued twice, it must
    not use up another place.
    """
    twin = next((t for t in counted(trial.study, before=trial.number) if t.params == trial.params), None)
    if twin is None:
        return None
    is_queued = "fixed_params" in trial.study._storage.get_trial(trial._trial_id).system_attrs
    if is_queued or not twin.state.is_finished():
        trial.set_user_attr(_DOUBLE, True)
        raise Surplus(f"trial {twin.number} tries the same values")
    trial.set_user_attr("same_as", twin.number)
    if twin.state is TrialState.PRUNED:
        for step, value in twin.intermediate_values.items():
            trial.report(value, step)
    return twin


def trial_specs(spec: RunSpec, values: Mapping[str, Any], budget: Budget) -> list[RunSpec]:
    """The runs of a trial, one a seed; a share of the training data takes the place of their test split.

    Client fine-tuning after the last round is left out; it changes no metric that could be tuned for.
    """
    scenario = spec.scenario.model_copy(update={"validation": budget.validation})
    training = spec.training.model_copy(update={"finetune_epochs": 0})
    changed = with_values(spec.model_copy(update={"scenario": scenario, "training": training, "published": ()}), values)
    return [changed.model_copy(update={"seed": seed}) for seed in budget.seeds]


def score(
    trial: optuna.Trial, specs: Sequence[RunSpec], summaries: Mapping[str, Mapping[str, float]], budget: Budget
) -> tuple[float, ...]:
    """The values of the objectives, means over ``specs``; ``summaries`` are by run id."""
    of_runs = [summaries[spec.run_id] for spec in specs]
    by_seed = [tuple(Objective(metric).of(summary) for metric in budget.objectives) for summary in of_runs]
    trial.set_user_attr("by_seed", {str(spec.seed): v for spec, v in zip(specs, by_seed, strict=True)})
    trial.set_user_attr("bytes", sum(s["bytes_up"] + s["bytes_down"] for s in of_runs) / len(of_runs))
    return tuple(sum(column) / len(by_seed) for column in zip(*by_seed, strict=True))


def sampler(budget: Budget, place: int, doubles: int = 0) -> TPESampler:
    """Tree-structured Parzen estimator for the trial at ``place``: random for the first few, then modelled on earlier.

    ``doubles`` is how many trials that drew at this place before drew what was being tried already.
    """
    drawn = (place, doubles) if doubles else (place,)
    seed = int(numpy_generator(budget.sampler_seed, "tuning", *drawn).integers(2**32))
    # trials still running count as bad, so that parallel ones don't all try the same
    return TPESampler(n_startup_trials=_STARTUP, constant_liar=True, seed=seed)


def pruner(name: str, rounds: int) -> BasePruner:
    """The pruner called ``name``, for runs of so many rounds.

    ``median`` ends a trial below the median of the earlier ones, in the second half of its rounds: in the first,
    networks trained from scratch are all near chance. ``halving`` keeps the better half at a quarter, and at half.
    """
    if name == "median":
        return MedianPruner(n_startup_trials=_STARTUP, n_warmup_steps=rounds // 2)
    if name == "halving":
        return _Halving(min_resource=max(1, rounds // 4), reduction_factor=2)
    return NopPruner()


class _Halving(SuccessiveHalvingPruner):
    """Successive halving among the trials that count: one whose command died is tried again, and competes then."""

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        return super().prune(cast(optuna.Study, _Counted(study)), trial)


class _Counted:
    """A study without its failed trials, as far as a pruner reads it."""

    def __init__(self, study: optuna.Study) -> None:
        self._study = study

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def get_trials(self, deepcopy: bool = True) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=deepcopy, states=COUNTED)

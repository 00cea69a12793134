"""Optuna studies: what is written down with them, and what uses up their budget.

One study a row and setting of a suite; those of one tuning belong together under a name and have the same budget. They
live in a database (SQLite beside the runs, or any that Optuna reaches), so that they outlive a crash and several
processes can share them, and open in optuna-dashboard as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import optuna
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, TrialState

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.tuning.objectives import Objective

_RECORD = "fedbench"
"""User attribute that holds a study's `Record`."""
COUNTED = (TrialState.RUNNING, TrialState.WAITING, TrialState.COMPLETE, TrialState.PRUNED)
PLACE = "place"
"""User attribute of a trial: its place among those that count, which its values are drawn by."""
DRAWN = "drawn"
"""User attribute of a trial that has all its values."""
DEFAULTS = "defaults"
"""User attribute of the trial with the suite's own values."""


@dataclass(frozen=True)
class Budget:
    """What every study of a tuning may spend, and how: the same for all methods."""

    trials: int
    seeds: tuple[int, ...]
    objectives: tuple[str, ...]
    pruner: str
    sampler: str = "tpe"
    sampler_seed: int = 0
    validation: float = 0.2
    """Share of the training data that is scored."""
    runoff: tuple[int, ...] = ()
    """Seeds on which the best trials are run as well, to choose among them; see `fedbench.tuning.results`."""
    confirming: tuple[int, ...] = ()
    """Seeds that choose nothing: on these the chosen trial is run in the end."""

    @property
    def every_seed(self) -> tuple[int, ...]:
        """All seeds that anything is run on."""
        return (*self.seeds, *self.runoff, *self.confirming)

    def as_tags(self) -> dict[str, str]:
        """For the records of runs with the best parameters."""
        further = {"run-off seeds": self.runoff, "confirming seeds": self.confirming}
        return {
            "trials": str(self.trials),
            "seeds": " ".join(map(str, self.seeds)),
            **{name: " ".join(map(str, seeds)) for name, seeds in further.items() if seeds},
            "objective": " ".join(self.objectives),
            "pruner": self.pruner,
            "sampler": self.sampler,
            "validation": f"{self.validation:g}",
        }


@dataclass(frozen=True)
class Record:
    """What is written down with a study."""

    name: str
    """Name of the tuning, which may hold several studies."""
    suite: str
    scale: str
    setting: str
    row: str
    title: str
    spec: dict[str, Any]
    """The row as the suite has it: what the first trial runs, but for the validation split."""
    space: tuple[dict[str, Any], ...]
    budget: Budget
    code_hash: str
    data_hash: str
    weights_hash: str
    commit: str
    command: str = ""
    """What makes the study again."""
    versions: dict[str, str] = field(default_factory=dict)
    method_code: str = ""
    """Code hash of each method of the row, as JSON."""

    @property
    def study_name(self) -> str:
        """What Optuna calls the study."""
        return f"{self.name} · {self.title}"

    def dumped(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)


def record_of(study: optuna.Study) -> Record:
    """What was written down when ``study`` was created."""
    content: dict[str, Any] = json.loads(study.user_attrs[_RECORD])
    spent: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in content["budget"].items()}
    try:
        content |= {"budget": Budget(**spent), "space": tuple(content["space"])}
        return Record(**content)
    except TypeError as error:
        raise FedbenchError(
            f"the study {study.study_name!r} was made by another version of fedbench ({error}); use that version, or "
            "another --study or --storage."
        ) from error


def open_study(storage: RDBStorage, record: Record, defaults: Mapping[str, Any]) -> optuna.Study:
    """The study of ``record``, created if new, with ``defaults`` as its first trial; more trials extend an old one.

    Raises FedbenchError where a study of that name was made under other conditions, or a row's of the same tuning with
    another budget.
    """
    directions = [Objective(metric).direction for metric in record.budget.objectives]
    create = partial(optuna.create_study, storage=storage, study_name=record.study_name, directions=directions)
    study = create(load_if_exists=True)
    if not counted(study) and [direction.name.lower() for direction in study.directions] != directions:
        # it was made for other objectives, and all its trials failed
        optuna.delete_study(study_name=record.study_name, storage=storage)
        study = create(load_if_exists=True)
    if _RECORD in study.user_attrs and counted(study):
        old = record_of(study)
        _refuse_other_conditions(old, record)
        if old.budget.trials >= record.budget.trials:
            record = old
    for other in studies_named(storage):
        if json.loads(other.user_attrs[_RECORD])["name"] == record.name:
            _refuse_other_budget(record_of(other), record)
    study.set_metric_names(list(record.budget.objectives))
    study.set_user_attr(_RECORD, record.dumped())
    if not any(trial.user_attrs.get(DEFAULTS) for trial in counted(study)):
        study.enqueue_trial(dict(defaults), user_attrs={DEFAULTS: True})
    return study


def try_again(study: optuna.Study, dead: FrozenTrial) -> None:
    """Queue a trial whose command died once more, in its place.

    One that had not all its values is drawn anew: by its place, so that they are the same if the trials before it are.
    """
    dead.user_attrs = {name: dead.user_attrs[name] for name in (PLACE, DEFAULTS, DRAWN) if name in dead.user_attrs}
    # not what the pruner has noted of it
    dead.system_attrs = {k: v for k, v in dead.system_attrs.items() if k in ("fixed_params", "retry_history")}
    if DRAWN not in dead.user_attrs:
        dead.params, dead.distributions = {}, {}
    RetryHeartbeatStaleTrialCallback()(study, dead)


def counted(study: optuna.Study, before: int | None = None) -> list[FrozenTrial]:
    """The trials that use up the budget, those with a number under ``before`` only: all but failed ones.

    A trial fails when its command dies, which queues it once more, or when the budget turns out to be spent.
    """
    trials = study.get_trials(deepcopy=False, states=COUNTED)
    return [trial for trial in trials if before is None or trial.number < before]


def studies_named(storage: RDBStorage, name: str | None = None) -> list[optuna.Study]:
    """The studies of the tuning ``name`` (None: all), by row. FedbenchError with the nearest for an unknown name."""
    summaries = optuna.get_all_study_summaries(storage, include_best_trial=False)
    ours = {s.study_name: json.loads(s.user_attrs[_RECORD])["name"] for s in summaries if _RECORD in s.user_attrs}
    if name is not None and name not in ours.values():
        raise unknown_name("study", name, sorted(set(ours.values())), "Make it with `fedbench tune --study NAME`.")
    chosen = [study for study, own in ours.items() if name in (None, own)]
    return [optuna.load_study(study_name=study, storage=storage) for study in chosen]


def flat_settings(content: Mapping[str, object], head: str = "") -> dict[str, object]:
    """Settings by key as in --set: training and scenario by their own names, a method's under the method's."""
    flat: dict[str, object] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            flat |= flat_settings(value, "" if key in ("params", "training", "scenario") else f"{key}.")
        else:
            flat[f"{head}{key}"] = value
    return flat


def _refuse_other_budget(old: Record, new: Record) -> None:
    """Rows of one tuning differ in the number of trials at most, and where they do, tables say so."""
    for name, before, now in _other_budget(old, new):
        raise FedbenchError(
            f"in the study {old.name!r} {old.title!r} was tuned with another {name} ({before}, now {now}); methods "
            f"are compared under an equal budget: start a new study with --study NAME{_same_seeds(old, name)}."
        )


def _refuse_other_conditions(old: Record, new: Record) -> None:
    hashes = ("code_hash", "data_hash", "weights_hash")
    now = flat_settings(new.spec)
    differing = [
        *((name, getattr(old, name)[:8], getattr(new, name)[:8]) for name in hashes),
        ("space", json.dumps(list(old.space)), json.dumps(list(new.space))),
        *_other_budget(old, new),
        *((key, str(value), str(now.get(key))) for key, value in flat_settings(old.spec).items()),
    ]
    for name, before, after in differing:
        if before != after:
            raise FedbenchError(
                f"the study {old.study_name!r} was made with another {name} ({before[:80]}, now {after[:80]}); trials "
                "under different conditions don't compare: start a new study with --study "
                f"NAME{_same_seeds(old, name)}."
            )


def _other_budget(old: Record, new: Record) -> list[tuple[str, str, str]]:
    """What differs between the budgets, but for the number of trials, with its values."""
    both = [(name, before, getattr(new.budget, name)) for name, before in asdict(old.budget).items()]
    return [(name, str(before), str(now)) for name, before, now in both if name != "trials" and before != now]


def _same_seeds(old: Record, name: str) -> str:
    """The options that go on with a study of other seeds than today's default; "" for other differences."""
    if name not in ("seeds", "runoff", "confirming"):
        return ""
    seeds = " ".join(f"--seed {seed}" for seed in old.budget.seeds)
    return f", or go on with this one by {seeds} --confirm {len(old.budget.confirming)}"

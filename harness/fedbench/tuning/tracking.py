"""Trials in MLflow: one experiment a suite's tuning, one run a study, one child run a trial."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

import optuna
from optuna.trial import FrozenTrial

from fedbench.core.errors import FedbenchError
from fedbench.tracking.databases import shown
from fedbench.tracking.recording import COMMIT, NOTE, SOURCE, Patience, begin_run, end_run, log, metrics_at, patient
from fedbench.tracking.schema import METHOD_CODE, TUNING
from fedbench.tracking.store import experiment_of, open_store
from fedbench.tuning.results import result_of
from fedbench.tuning.studies import DEFAULTS, Record, record_of

_PATIENCE = 120.0
"""Seconds for which a store that can't be written is tried again."""
_RUN = "mlflow_run"
"""User attribute of a trial: the id of its MLflow run."""
_NAME_HASH = "fedbench.study_hash"
_VALIDATION = "validation/"
"""Prefix of everything measured in a trial, so that nobody takes it for a test result."""


class TrialTracking:
    """Writes the trials of a suite's studies to the store at ``uri``."""

    def __init__(self, uri: str, suite: str, tell: Callable[[str], None]) -> None:
        client = open_store(uri, create=True)
        if client is None:
            raise FedbenchError(f"the store {shown(uri)!r} cannot be created.")
        self._client = client = patient(client, Patience(uri, tell, _PATIENCE))
        self._experiment = experiment_of(client, uri, suite, TUNING)
        self._parents: dict[str, str] = {}

    def began(self, trial: optuna.Trial, values: Mapping[str, object]) -> None:
        """A child run with the trial's values."""
        record = record_of(trial.study)
        tags = {"fedbench.kind": "trial", "fedbench.trial": str(trial.number), **_tags_of(record)}
        name = f"trial {trial.number}" + (" · defaults" if trial.user_attrs.get(DEFAULTS) else "")
        run = begin_run(self._client, self._experiment, name, tags, self._parent(record))
        trial.set_user_attr(_RUN, run)
        log(self._client, run, params={key: str(value) for key, value in values.items()})

    def ended(
        self, trial: optuna.Trial, values: tuple[float, ...], reason: str, by_round: Mapping[int, Mapping[str, float]]
    ) -> None:
        """The child run ends: metrics by round, means over seeds, and the objectives, or why the trial was pruned."""
        run, attributes, objectives = trial.user_attrs[_RUN], trial.user_attrs, record_of(trial.study).budget.objectives
        metrics = [
            metric
            for number, means in by_round.items()
            for metric in metrics_at({_VALIDATION + name: value for name, value in means.items()}, number)
        ]
        named = {f"objective/{metric}": value for metric, value in zip(objectives, values, strict=False)}
        named |= {cost: float(attributes[cost]) for cost in ("seconds", "bytes") if cost in attributes}
        step = trial.study._storage.get_trial(trial._trial_id).last_step or 0
        metrics += metrics_at(named, step)
        outcome = {"fedbench.state": "complete" if values else "pruned", "fedbench.reason": reason}
        log(self._client, run, metrics, tags=outcome)
        end_run(self._client, run, "FINISHED")

    def stopped(self, trial: optuna.Trial | FrozenTrial, status: str) -> None:
        """The child run of a trial ends as FAILED, by an error that is no outcome, or KILLED, to be tried again."""
        if _RUN in trial.user_attrs:
            end_run(self._client, trial.user_attrs[_RUN], status)

    def tell_best(self, study: optuna.Study) -> None:
        """The study's own run tells the best trial so far."""
        result = result_of(study)
        if result is None:
            return
        metric, best = result.record.budget.objectives[0], result.best[0]
        lines = [f"**{key}** {value}" for key, value in result.values.items()]
        text = f"{result.record.study_name}: best so far trial {result.trial} with {metric} {best:.2f}"
        note = "\n\n".join([text + ", on validation data.", *lines])
        metrics = metrics_at({f"best/{metric}": best}, result.states["complete"])
        log(self._client, self._parent(result.record), metrics, tags={NOTE: note})

    def finished(self, study: optuna.Study, status: str) -> None:
        """The study's own run ends with the confirmation; others that commands which died began for it go.

        ``status`` is FINISHED, or FAILED where an error stopped the search.
        """
        self.tell_best(study)  # the run-off may have chosen another
        record, result = record_of(study), result_of(study)
        ours = self._parent(record)
        if result is not None and result.confirmed is not None:
            named = {f"confirmation/{m}": v for m, v in zip(record.budget.objectives, result.confirmed, strict=True)}
            log(self._client, ours, metrics_at(named, result.states["complete"]))
        end_run(self._client, ours, status)
        for other in self._of_study(record):
            if other != ours:
                self._client.delete_run(other)

    def _parent(self, record: Record) -> str:
        """The id of the study's run; of several that commands began at the same moment, the oldest."""
        if record.study_name not in self._parents:
            if not self._of_study(record):
                tags = {
                    "fedbench.kind": "study",
                    **_tags_of(record),
                    "fedbench.suite": record.suite,
                    "fedbench.row": record.row,
                    "fedbench.code_hash": record.code_hash,
                    "fedbench.tuning.space": json.dumps(record.space, ensure_ascii=False),
                    **{f"fedbench.budget.{name}": value for name, value in record.budget.as_tags().items()},
                }
                begin_run(self._client, self._experiment, record.study_name, tags)
            self._parents[record.study_name] = self._of_study(record)[0]
        return self._parents[record.study_name]

    def _of_study(self, record: Record) -> list[str]:
        # a row's name may hold quotes, which MLflow's filters cannot
        condition = f"tags.`{_NAME_HASH}` = '{_hash(record)}' and tags.`fedbench.kind` = 'study'"
        runs = self._client.search_runs([self._experiment], condition)
        return [run.info.run_id for run in sorted(runs, key=lambda run: (run.info.start_time, run.info.run_id))]


def _hash(record: Record) -> str:
    return hashlib.sha256(record.study_name.encode()).hexdigest()[:16]


def _tags_of(record: Record) -> dict[str, str]:
    """What MLflow shows of where a run comes from, and what to filter studies and trials by."""
    named = {
        "method": str(record.spec["method"]),
        "backbone": str(record.spec["backbone"]),
        "setting": record.setting,
        "scale": record.scale,
        "fedbench.study": record.study_name,
        _NAME_HASH: _hash(record),
        SOURCE: "fedbench",
        COMMIT: record.commit,
        METHOD_CODE: record.method_code,
    }
    return {key: value for key, value in named.items() if value}

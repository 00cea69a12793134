"""Trials in MLflow: one experiment a suite's tuning, one run a study, one child run a trial."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from fedbench.core.errors import FedbenchError
from fedbench.tracking.databases import shown
from fedbench.tracking.recording import (
    COMMIT,
    NOTE,
    SOURCE,
    Patience,
    begin_run,
    end_run,
    log,
    metrics_at,
    patient,
)
from fedbench.tracking.schema import METHOD_CODE, TUNING
from fedbench.tracking.store import experiment_of, open_store
from fedbench.tuning.found import found
from fedbench.tuning.storage import GRACE
from fedbench.tuning.studies import DEFAULTS, Record, record_of

# isort: split
from mlflow.entities import Run

_PATIENCE = 120.0
"""Seconds for which a store that can't be written is tried again."""
_RUN = "mlflow_run"
"""User attribute of a trial: the id of its MLflow run."""
_STUDY = "fedbench.study"
_TRIAL = "fedbench.trial"
_MANY = 50_000
"""As many runs as MLflow gives at once; no study has more trials."""
_NAME_HASH = "fedbench.study_hash"
_VALIDATION = "validation/"
"""Prefix of everything measured in a trial, so that nobody takes it for a test result."""


class TrialTracking:
    """Writes the trials of a suite's studies to the store at ``uri``."""

    def __init__(self, uri: str, suite: str) -> None:
        client = open_store(uri, create=True)
        if client is None:
            raise FedbenchError(f"the store {shown(uri)!r} cannot be created.")
        self._client = client = patient(client, Patience(uri, lambda _: None, _PATIENCE))
        self._experiment = experiment_of(client, uri, suite, TUNING)
        self._parents: dict[str, str] = {}

    def began(self, trial: optuna.Trial, values: Mapping[str, Any]) -> None:
        """A child run with the trial's values."""
        trial.set_user_attr(_RUN, self._child(record_of(trial.study), trial, values))

    def measured(self, trial: optuna.Trial, by_round: Mapping[int, Mapping[str, float]]) -> None:
        """The trial's metrics by round, means over seeds, all of them on validation data."""
        metrics = [
            metric
            for number, means in by_round.items()
            for metric in metrics_at({_VALIDATION + name: value for name, value in means.items()}, number)
        ]
        log(self._client, trial.user_attrs[_RUN], metrics)

    def ended(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """The child run ends: its objectives, and whether it was pruned; the study's run tells the best so far."""
        run = trial.user_attrs.get(_RUN)
        if run is not None:
            self._end(study, trial, run)

    def _child(self, record: Record, trial: optuna.Trial | FrozenTrial, values: Mapping[str, Any]) -> str:
        tags = {"fedbench.kind": "trial", _TRIAL: str(trial.number), **_tags_of(record)}
        name = f"trial {trial.number}" + (" · defaults" if trial.user_attrs.get(DEFAULTS) else "")
        run = begin_run(self._client, self._experiment, name, tags, self._parent(record))
        log(self._client, run, params={key: str(value) for key, value in values.items()})
        return run

    def _end(self, study: optuna.Study, trial: FrozenTrial, run: str) -> None:
        record = record_of(study)
        outcome = {
            "fedbench.state": trial.state.name.lower(),
            "fedbench.reason": str(trial.user_attrs.get("reason", "")),
        }
        costs: dict[str, float] = {
            name: float(trial.user_attrs[name]) for name in ("seconds", "bytes") if name in trial.user_attrs
        }
        values = trial.values if trial.state is TrialState.COMPLETE else ()
        named: dict[str, float] = {
            f"objective/{m}": v for m, v in zip(record.budget.objectives, values or (), strict=False)
        }
        # of a process that died at this point they may be there
        known = self._client.get_run(run).data.metrics
        missing = {name: value for name, value in {**named, **costs}.items() if name not in known}
        log(self._client, run, metrics_at(missing, trial.last_step or 0), tags=outcome)
        end_run(self._client, run, "FINISHED")
        self._tell_best(study, record)

    def broken(self, trial: optuna.Trial) -> None:
        """The child run of a trial that met an error which is no outcome is FAILED."""
        end_run(self._client, trial.user_attrs[_RUN], "FAILED")

    def abandoned(self, trial: FrozenTrial) -> None:
        """The run of a trial whose process died is KILLED; the trial is tried again under another."""
        run = trial.user_attrs.get(_RUN)
        if run is not None:
            end_run(self._client, run, "KILLED")

    def catch_up(self, study: optuna.Study) -> bool:
        """Make up for what processes that died did not get to: the ends of child runs, a run of a trial given up.

        False where a trial ended so recently that its own process may be about to do it.
        """
        record = record_of(study)
        recently = datetime.now() - timedelta(seconds=GRACE)
        over = {
            str(trial.number): trial
            for trial in study.get_trials(deepcopy=False)
            if trial.state in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        }
        is_done = True
        for run in self._children(record, "and attributes.status = 'RUNNING'"):
            trial = over.get(run.data.tags[_TRIAL])
            if trial is None:
                continue
            if trial.datetime_complete is not None and trial.datetime_complete > recently:
                is_done = False
            elif trial.state is TrialState.FAIL or trial.user_attrs.get(_RUN) != run.info.run_id:
                end_run(self._client, run.info.run_id, "KILLED")
            else:
                self._end(study, trial, run.info.run_id)
        given_up = [
            trial for trial in over.values() if trial.state is TrialState.PRUNED and _RUN not in trial.user_attrs
        ]
        if given_up:
            known = {run.data.tags[_TRIAL] for run in self._children(record)}
            for trial in given_up:
                if str(trial.number) not in known:
                    self._end(study, trial, self._child(record, trial, trial.params))
        return is_done

    def _children(self, record: Record, further: str = "") -> list[Run]:
        condition = f"tags.`{_NAME_HASH}` = '{_hash(record)}' and tags.`fedbench.kind` = 'trial' {further}"
        return list(self._client.search_runs([self._experiment], condition, max_results=_MANY))

    def _tell_best(self, study: optuna.Study, record: Record) -> None:
        result = found(study)
        if result is None:
            return
        metric, best, parent = record.budget.objectives[0], result.best[0], self._parent(record)
        lines = [f"**{key}** {value}" for key, value in result.values.items()]
        text = f"{record.study_name}: best so far trial {result.trial} with {metric} {best:.2f}"
        note = "\n\n".join([text + ", on validation data.", *lines])
        log(self._client, parent, metrics_at({f"best/{metric}": best}, result.states["complete"]), tags={NOTE: note})

    def finished(self, study: optuna.Study) -> None:
        """The study's own run ends, with the confirmation; others that processes which died began for it are none."""
        record = record_of(study)
        ours = self._parent(record)
        self._tell_best(study, record)  # the run-off may have chosen another
        result = found(study)
        if result is not None and result.confirmed is not None:
            named = {f"confirmation/{m}": v for m, v in zip(record.budget.objectives, result.confirmed, strict=True)}
            log(self._client, ours, metrics_at(named, result.states["complete"]))
        end_run(self._client, ours, "FINISHED")
        for other in self._of_study(record):
            if other != ours:
                self._client.delete_run(other)

    def _parent(self, record: Record) -> str:
        """The id of the study's run; of several that processes made at the same moment, the oldest."""
        known = self._parents.get(record.study_name)
        if known is not None:
            return known
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
            made = begin_run(self._client, self._experiment, record.study_name, tags)
            oldest = self._of_study(record)[0]
            if oldest != made:
                self._client.delete_run(made)
        self._parents[record.study_name] = self._of_study(record)[0]
        return self._parents[record.study_name]

    def _of_study(self, record: Record) -> list[str]:
        # a row's name may hold quotes, which MLflow's filters cannot
        condition = f"tags.`{_NAME_HASH}` = '{_hash(record)}' and tags.`fedbench.kind` = 'study'"
        runs = self._client.search_runs([self._experiment], condition, order_by=["attributes.start_time ASC"])
        return [run.info.run_id for run in sorted(runs, key=lambda run: (run.info.start_time, run.info.run_id))]


def _hash(record: Record) -> str:
    return hashlib.sha256(record.study_name.encode()).hexdigest()[:16]


def _tags_of(record: Record) -> dict[str, str]:
    """What MLflow shows of where a run comes from, and what to filter studies and trials by."""
    plain = {"method": str(record.spec["method"]), "backbone": str(record.spec["backbone"]), "setting": record.setting}
    named = {
        **plain,
        "scale": record.scale,
        _STUDY: record.study_name,
        _NAME_HASH: _hash(record),
        SOURCE: "fedbench",
        COMMIT: record.commit,
        METHOD_CODE: record.method_code,
    }
    return {key: value for key, value in named.items() if value}

"""A tuning study under kills: one worker, so that its trials are those of a study that was never disturbed."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from fedbench.tracking.schema import TUNING, store_uri
from fedbench.tracking.store import open_store
from fedbench.tuning.results import result_of
from fedbench.tuning.storage import open_storage, storage_url
from fedbench.tuning.studies import counted, studies_named
from tests.soak.fedbench_command import Command, Started
from tests.soak.soak import Moment, at_file, at_line, at_time, is_left_by

SUITE = """
name: soak
dataset: embedded?train=240&test=40
scenario: {imbalance: none, partition: dirichlet, clients: 4, participation: 0.5, min_client_size: 1}
backbone: clip:embedded
training: {rounds: 4, local_epochs: 1, batch_size: 16, lr: 0.01}
rows:
  - method: fedavg
  - method: fedprox
"""
TRIALS = 9
"""Of each row: five random ones, then some by the sampler's model; the pruner sets in as well."""
_PRUNERS = ("halving", "median")
_LINES = ("start", "done", "pruned")


class StudySoak:
    """``fedbench tune`` with one worker; the pruners take turns."""

    name, title = "study", "tuning study"

    def __init__(self, command: Command) -> None:
        self._command = command
        self._pruner = _PRUNERS[0]
        self._store = command.folder
        self._references: dict[str, tuple[dict[str, Any], list[str]]] = {}
        self._planned = 10.0
        (command.folder / "soak.yaml").write_text(SUITE, encoding="utf-8")

    def undisturbed(self) -> None:
        """Once with the pruner of the first attempt; with the other when its turn has come."""
        self._reference(_PRUNERS[0])

    def fresh(self, attempt: int) -> None:
        """Another store and database of studies."""
        self._pruner = _PRUNERS[(attempt - 1) % len(_PRUNERS)]
        self._store = self._command.folder / f"store-{attempt:02d}"

    def start(self) -> Started:
        """The same command every time."""
        return self._command.start(
            "tune", "--suite", "soak.yaml", "--store", self._store.name, "--jobs", "1", "--trials", str(TRIALS),
            "--pruner", self._pruner,
        )  # fmt: skip

    def moment(self, rng: random.Random) -> tuple[str, Moment]:
        """While it plans, between lines, within writes of both databases, and at the end."""
        delay = rng.random()
        lines = rng.randrange(1, 8)
        kinds: dict[str, tuple[float, Moment]] = {
            "planning": (0.1, at_time(rng.uniform(0.0, 1.1 * self._planned))),
            "line": (0.35, at_line(lines, delay, _LINES)),
            "studies": (0.3, at_file(self._store, "studies.db-journal", rng.randrange(1, 50))),
            "store": (0.2, at_file(self._store, "mlflow.db-journal", rng.randrange(1, 25))),
            "end": (0.05, at_line(1, delay, ("row",))),
        }
        (chosen,) = rng.choices(list(kinds), [weight for weight, _ in kinds.values()])
        return chosen, kinds[chosen][1]

    def target(self, rng: random.Random) -> str:
        """Mostly everything at once, as a machine dies."""
        return rng.choices(["group", "parent", "worker"], [0.7, 0.15, 0.15])[0]

    def phase(self, started: Started) -> str:
        """By the files, and by what the studies say."""
        if is_left_by(started, self._store / "studies.db-journal"):
            return "within a write of the studies"
        if is_left_by(started, self._store / "mlflow.db-journal"):
            return "within a write of the store"
        studies = _studies(self._store)
        if len(studies) < 2 or not any(study.trials for study in studies):
            return "before both studies were there"
        running = [trial for study in studies for trial in study.trials if trial.state is TrialState.RUNNING]
        if any(trial.params for trial in running):
            return "a trial under way"
        if running:
            return "a trial without its values"
        if not any(line.startswith(_LINES) for line in started.lines):
            return "before the first trial began"
        if all(len(counted(study)) == TRIALS for study in studies):
            return "after the last trial"
        return "between trials"

    def resumed(self, started: Started) -> list[str]:
        """Trials that were tried again are in the studies, not in the output: see `differences`."""
        return []

    def differences(self) -> list[str]:
        """Of trials by their place, of what the study command tells, and of the records in MLflow."""
        expected, told = self._reference(self._pruner)
        actual = trials_of(self._store)
        wrong = []
        for name in sorted(expected.keys() | actual.keys()):
            ours, theirs = expected.get(name, []), actual.get(name, [])
            if len(ours) != len(theirs):
                wrong.append(f"{name}: {len(theirs)} trials instead of {len(ours)}")
            for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
                wrong += [
                    f"{name}, trial at place {place}, {key}: {str(other[key])[:150]} instead of {str(one[key])[:150]}"
                    for key in one
                    if one[key] != other[key]
                ]
        if self._told() != told:
            wrong.append("what `fedbench study` tells differs")
        return [*wrong, *_records(self._store)]

    def _told(self) -> list[str]:
        lines = self._command.text("study", "soak", "--store", self._store.name).splitlines()
        return [line for line in lines if self._store.name not in line]

    def _reference(self, chosen: str) -> tuple[dict[str, Any], list[str]]:
        if chosen not in self._references:
            before = self._pruner, self._store
            self._pruner, self._store = chosen, self._command.folder / f"undisturbed-{chosen}"
            started = self.start()
            while (code := started.ended()) is None:
                if not any(line.startswith("start") for line in started.lines):
                    self._planned = started.age()
            time.sleep(0.05)
            started.close()
            if code:
                raise RuntimeError(f"the undisturbed study failed: see {started.output}")
            self._references[chosen] = trials_of(self._store), self._told()
            self._pruner, self._store = before
        return self._references[chosen]


def _studies(folder: Path) -> list[optuna.Study]:
    url = storage_url(None, store_uri(str(folder)))
    if not (folder / "studies.db").exists():
        return []
    return studies_named(open_storage(url, create=False))


def trials_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Of each study in the store of ``folder`` the trials that count in their order, each as kills must leave it."""
    client = open_store(store_uri(str(folder)), create=False)
    assert client is not None

    history = client.get_metric_history

    def told(trial: FrozenTrial, places: dict[int, int]) -> dict[str, Any]:
        run = client.get_run(trial.user_attrs["mlflow_run"])
        twin = trial.user_attrs.get("same_as")
        return {
            "state": trial.state.name,
            "params": trial.params,
            "values": trial.values,
            "by round": trial.intermediate_values,
            "by seed": trial.user_attrs.get("by_seed"),
            "bytes": trial.user_attrs.get("bytes"),
            "defaults": trial.user_attrs.get("defaults"),
            "same as": None if twin is None else places[twin],
            "run's status": run.info.status,
            "run's params": run.data.params,
            "run's metrics": {
                key: [(m.step, "" if key == "seconds" else m.value) for m in history(run.info.run_id, key)]
                for key in sorted(run.data.metrics)
            },
        }  # fmt: skip

    all_told = {}
    for study in _studies(folder):
        kept = counted(study)
        places = {trial.number: place for place, trial in enumerate(kept)}
        best = result_of(study)
        assert best is not None
        all_told[study.study_name] = [
            {"best": (places[best.trial], best.best, best.values, best.defaults, best.states)},
            *(told(trial, places) for trial in kept),
        ]
    return all_told


def _records(folder: Path) -> list[str]:
    """What is wrong with the runs in MLflow: left running, there twice, or of no trial that counts."""
    client = open_store(store_uri(str(folder)), create=False)
    assert client is not None
    experiment = client.get_experiment_by_name(f"{TUNING}soak")
    runs = client.search_runs([experiment.experiment_id], max_results=50_000)
    wrong = [f"MLflow run {run.info.run_name!r} still is RUNNING" for run in runs if run.info.status == "RUNNING"]
    tags = [run.data.tags for run in runs if run.info.status == "FINISHED"]
    trials = Counter((t["fedbench.study"], t["fedbench.trial"]) for t in tags if t["fedbench.kind"] == "trial")
    counting = {(study.study_name, str(trial.number)) for study in _studies(folder) for trial in counted(study)}
    wrong += [f"trial {trial} has {number} finished MLflow runs" for trial, number in trials.items() if number > 1]
    wrong += [f"trial {trial} has no finished MLflow run" for trial in counting - trials.keys()]
    wrong += [f"the MLflow run of {trial} is of no trial that counts" for trial in trials.keys() - counting]
    for study, number in Counter(t["fedbench.study"] for t in tags if t["fedbench.kind"] == "study").items():
        if number != 1:
            wrong.append(f"study {study} has {number} MLflow runs of its own")
    return wrong

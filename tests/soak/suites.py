"""A small suite under kills: methods with state on the server, on clients, and layers that clients keep."""

from __future__ import annotations

import hashlib
import random
import re
import time
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedbench.rounds.state import Saved, read_saved
from fedbench.tracking import store as _store  # noqa: F401 - sets MLflow up before it is first imported
from fedbench.tracking.artifacts import read_predictions
from fedbench.tracking.schema import local_artifacts, store_uri
from fedbench.tracking.store import open_store
from fedbench_boards.leaderboard.results import load_results
from tests.soak.fedbench_command import Command, Started
from tests.soak.soak import Moment, at_file, at_line, at_time, is_left_by

SUITE = """
name: soak
dataset: embedded?train=240&test=40
scenario: {imbalance: none, partition: dirichlet, clients: 4, participation: 0.5, min_client_size: 1, dropout: 0.2}
backbone: clip:embedded
training: {rounds: 8, local_epochs: 1, batch_size: 16, lr: 0.01}
seeds: [0, 1]
rows:
  - method: fedavg
  - method: scaffold
  - method: fedclip
  - method: promptfl
  - {method: moon, set: {backbone: convnet, rounds: 3}}
  - {method: fedbn, set: {backbone: "resnet8?width=1", rounds: 2}}
"""
RUNS = 12
_LINES = ("start", "round", "done")
_TIMES = re.compile(r"seconds|time", re.IGNORECASE)
"""In the names of what two runs may differ in."""
_HALF_WRITTEN = "unfinished/soak/checkpoints/*/.*.tmp"
_LAST = re.compile(r"\((\d+)/\1\)$")
"""At the end of a line that tells of the command's last run."""
_OWN = {"mlflow_id", "parent", "started", "resumed_round", "seal"}
"""Columns of results that are an attempt's, not the run's."""
_OWN_TAGS = {"fedbench.resumed_round", "fedbench.claims", "fedbench.seal"}


class SuiteSoak:
    """``fedbench run`` of the suite, two jobs, a checkpoint every second round."""

    name, title = "suite", "suite"

    def __init__(self, command: Command) -> None:
        self._command = command
        self._store = command.folder / "undisturbed"
        self._reference: dict[str, dict[str, Any]] = {}
        self._planned = 10.0
        (command.folder / "soak.yaml").write_text(SUITE, encoding="utf-8")

    def undisturbed(self) -> None:
        """Once, beside nothing."""
        started = self.start()
        while started.ended() is None:
            if not any(line.startswith("start") for line in started.lines):
                self._planned = started.age()
            time.sleep(0.05)
        started.close()
        if started.ended():
            raise RuntimeError(f"the undisturbed suite failed: see {started.output}")
        self._reference = stored(self._store)
        if len(self._reference) != RUNS:
            raise RuntimeError(f"{len(self._reference)} of {RUNS} runs were stored, see {started.output}")

    def fresh(self, attempt: int) -> None:
        """Another store; data and features stay in the cache."""
        self._store = self._command.folder / f"store-{attempt:02d}"

    def start(self) -> Started:
        """The same command every time, but for where clients' states lie: undisturbed in memory, else in files."""
        return self._command.start(
            "run", "--suite", "soak.yaml", "--store", self._store.name, "--jobs", "2", "--checkpoint-every", "2",
            *(("--state-memory", "0") if self._reference else ()),
        )  # fmt: skip

    def moment(self, rng: random.Random) -> tuple[str, Moment]:
        """While it plans, between lines, within checkpoints and writes of the store, and at the end."""
        delay = rng.random() ** 2
        unfinished = self._store / "unfinished" / "soak" / "checkpoints"
        kinds: dict[str, tuple[float, Moment]] = {
            "planning": (0.12, at_time(rng.uniform(0.0, 1.1 * self._planned))),
            "line": (0.32, at_line(rng.randrange(1, 25), delay, _LINES)),
            "checkpoint": (0.2, at_file(unfinished, "*/.*.tmp", rng.randrange(1, 6))),
            "store": (0.2, at_file(self._store, "mlflow.db-journal", rng.randrange(1, 30))),
            "artifacts": (0.1, at_file(self._store, "artifacts/soak/*/artifacts/*", rng.randrange(1, 4), delay / 20)),
            "end": (0.06, at_line(1, 2 * delay, ("embedded?train", "target", "#", "store"))),
        }
        (chosen,) = rng.choices(list(kinds), [weight for weight, _ in kinds.values()])
        return chosen, kinds[chosen][1]

    def target(self, rng: random.Random) -> str:
        """Mostly everything at once, as a machine dies."""
        return rng.choices(["group", "parent", "worker", "server"], [0.68, 0.12, 0.13, 0.07])[0]

    def is_spared(self) -> bool:
        """Never."""
        return False

    def may_fail(self, target: str) -> bool:
        """Never: a run whose process dies is tried again."""
        return False

    def phase(self, started: Started) -> str:
        """By the files of the store, and the lines."""
        done = sum(line.startswith("done") for line in started.lines)
        if is_left_by(started, self._store / "mlflow.db-journal"):
            return "within a write of the store"
        if any(is_left_by(started, file) for file in self._store.glob(_HALF_WRITTEN)):
            return "within a checkpoint"
        if any(_LAST.search(line) or f"{RUNS} of {RUNS} runs are in the store" in line for line in started.lines):
            return "after the last run"
        if not any(line.startswith("start") for line in started.lines):
            return "before the first run began"
        under_way = sum(line.startswith("start") for line in started.lines) - done
        return f"{under_way} run{'s' if under_way != 1 else ''} under way"

    def resumed(self, started: Started) -> list[str]:
        """The rounds gone on from."""
        return [line for line in started.lines if "goes on from round" in line]

    def differences(self) -> list[str]:
        """Of runs, their numbers by round and at the end, their files, and what is left over."""
        return [*compared(self._reference, stored(self._store)), *self._left_over(), *self._leaderboard()]

    def _leaderboard(self) -> list[str]:
        boards = []
        for folder in (self._command.folder / "undisturbed", self._store):
            table = load_results(store_uri(str(folder)), "soak")
            kept = table[sorted(c for c in table.columns if c not in _OWN and not _TIMES.search(c))]
            boards.append(kept.sort_values("run_id").reset_index(drop=True))
        return [] if boards[0].equals(boards[1]) else ["the results that leaderboards read differ"]

    def _left_over(self) -> list[str]:
        """What blocks or would be gone on with, though everything is finished."""
        wrong = []
        client = open_store(store_uri(str(self._store)), create=False)
        assert client is not None
        for experiment in client.search_experiments():
            for run in client.search_runs([experiment.experiment_id], "attributes.status = 'RUNNING'"):
                wrong.append(f"MLflow run {run.info.run_name!r} still is RUNNING")
        unfinished = self._store / "unfinished" / "soak"
        wrong += [f"{file} is left" for file in (unfinished / "checkpoints").glob("*")]
        for file in (unfinished / "claims").glob("*.lock"):
            try:
                FileLock(file, timeout=0).acquire().lock.release()
            except Timeout:
                wrong.append(f"{file} still is locked")
        return wrong


def stored(folder: Path) -> dict[str, dict[str, Any]]:
    """The finished runs in the store of ``folder`` by run id, each as what must not depend on kills.

    A run that is there twice has ``finished`` 2.
    """
    uri = store_uri(str(folder))
    client = open_store(uri, create=False)
    assert client is not None
    experiment = client.get_experiment_by_name("fedbench/soak")
    found: dict[str, dict[str, Any]] = {}
    for run in client.search_runs([experiment.experiment_id], "attributes.status = 'FINISHED'"):
        run_id = run.data.tags.get("fedbench.run_id")
        if run_id is None:
            continue
        if run_id in found:
            found[run_id]["finished"] += 1
            continue
        artifacts = local_artifacts(uri, run)
        assert artifacts is not None
        saved = read_saved(artifacts / "model" / "state.safetensors")
        found[run_id] = {
            "finished": 1,
            "name": run.info.run_name,
            "params": dict(run.data.params),
            "notes": {
                k: v for k, v in run.data.tags.items()
                if k.startswith("fedbench.") and k not in _OWN_TAGS
            },
            "files": sorted(str(f.relative_to(artifacts)) for f in artifacts.rglob("*") if f.is_file()),
            "predictions": read_predictions(artifacts, run_id),
            "state": _digest(saved),
            **{
                f"metric {key}": [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)]
                for key in run.data.metrics
                if not _TIMES.search(key)
            },
            "steps": {
                key: sorted(m.step for m in client.get_metric_history(run.info.run_id, key))
                for key in run.data.metrics
                if _TIMES.search(key)
            },
        }  # fmt: skip
    return found


def compared(expected: dict[str, dict[str, Any]], actual: dict[str, dict[str, Any]]) -> list[str]:
    """A line for everything in which the stored runs differ."""
    wrong = [f"run {run_id} is missing" for run_id in expected.keys() - actual.keys()]
    wrong += [f"run {run_id} was not asked for" for run_id in actual.keys() - expected.keys()]
    for run_id in expected.keys() & actual.keys():
        ours, theirs = expected[run_id], actual[run_id]
        for key in sorted(ours.keys() | theirs.keys()):
            one, other = ours.get(key), theirs.get(key)
            if isinstance(one, dict) and isinstance(other, dict):
                names = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
                one, other = ({name: held.get(name) for name in sorted(names)} for held in (one, other))
            if one != other:
                wrong.append(f"{ours['name']} ({run_id}), {key}: {str(other)[:150]} instead of {str(one)[:150]}")
    return wrong


def _digest(saved: Saved) -> dict[str, str]:
    """sha256 of every tensor of the final model and of what methods keep, by its place."""
    state = saved.state
    groups: list[Any] = [(("weights",), state.weights), (("buffers",), state.buffers)]
    groups += [(("server", method), own) for method, own in state.server.items()]
    groups += [(("own", client), own) for client, own in state.own.items()]
    groups += [(("client", c, method), own) for c, methods in state.clients.items() for method, own in methods.items()]
    return {
        "|".join(map(str, (*place, name))): hashlib.sha256(
            f"{tensor.dtype}{tuple(tensor.shape)}".encode() + tensor.numpy().tobytes()
        ).hexdigest()
        for place, tensors in groups
        for name, tensor in tensors.items()
    }

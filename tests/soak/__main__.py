"""Kill fedbench at random moments and see that nothing is lost: ``python -m tests.soak --help``.

A suite is carried out once undisturbed. Then the same command is killed with SIGKILL and started again, over and over,
in fresh folders; whatever it stored at last must be what the undisturbed one stored. Its methods have state on the
server, on clients, and layers that clients keep.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from fedbench.rounds.state import Saved, read_saved
from fedbench.tracking.artifacts import read_predictions
from fedbench.tracking.schema import local_artifacts, store_uri
from fedbench.tracking.store import open_store
from fedbench_boards.leaderboard.results import load_results

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
PATIENCE = 1200.0
"""Seconds after which a command that doesn't end counts as hung."""
_LOOK = 0.004
"""Seconds between two looks for the moment; a file is written in a few times as long."""
_TIMES = re.compile(r"seconds|time", re.IGNORECASE)
"""In the names of what two runs may differ in."""
_OWN = {"mlflow_id", "parent", "started", "resumed_round", "seal"}
"""Columns of results that are an attempt's, not the run's."""
_OWN_TAGS = {"fedbench.resumed_round", "fedbench.claims", "fedbench.seal", "fedbench.rounds_hash"}


class Started:
    """A running ``fedbench`` and its processes."""

    def __init__(self, arguments: list[str], folder: Path, output: Path) -> None:
        self.output = output
        self.began = time.monotonic()
        self.lines: list[str] = []
        """Of its output so far, without their ends."""
        line = [sys.executable, "-c", "from fedbench.cli.app import command; command()", *arguments]
        # one thread a process: the numbers of two runs are compared bit for bit
        given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with output.open("w") as errors:
            self._process = subprocess.Popen(
                line, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, env=given
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def age(self) -> float:
        return time.monotonic() - self.began

    def ended(self) -> int | None:
        """Its exit code; None while it runs. Raises RuntimeError where it hangs."""
        code = self._process.poll()
        if code is None and self.age() > PATIENCE:
            self.kill("group")
            raise RuntimeError(f"it hung: no end after {PATIENCE:g} s, see {self.output}")
        return code

    def kill(self, target: str) -> str:
        """SIGKILL to the whole ``group``, the ``parent``, a ``worker`` or the fork ``server``; what was hit."""
        below = self._below()
        servers = [each for each in below if "forkserver" in _line(each) and _parent(each) == self._process.pid]
        workers = [each for each in below if any(_parent(each) == server.pid for server in servers)]
        if target == "worker" and workers:
            with suppress(psutil.NoSuchProcess):
                workers[len(self.lines) % len(workers)].kill()
            return target
        if target == "server" and servers:
            with suppress(psutil.NoSuchProcess):
                servers[0].kill()
            return target
        if target == "parent":
            self._process.kill()
        else:
            target = "group"
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # a worker that survives its parent leaves by itself; one that does not would go on beside the next start
        left = [process for process in below if process.is_running()]
        _, alive = psutil.wait_procs(left, timeout=30)
        if alive:
            raise RuntimeError(f"processes {[process.pid for process in alive]} outlived their command by 30 s")
        return target

    def close(self) -> None:
        self._process.wait()
        self._reader.join(10)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _below(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            with self.output.open("a") as file:
                file.write(line)


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _parent(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.Error:
        return 0


Moment = Callable[[Started], bool]
"""Whether it has come."""


def at_line(number: int, delay: float, *counted: str) -> Moment:
    """``delay`` seconds after the line ``number`` of this process's output that begins with one of ``counted``."""
    seen: list[float] = []

    def is_now(started: Started) -> bool:
        if not seen and sum(line.startswith(counted) for line in started.lines) >= number:
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() - seen[0] >= delay

    return is_now


def at_time(seconds: float) -> Moment:
    """So long after the start of the process."""
    return lambda started: time.monotonic() - started.began >= seconds


def at_file(folder: Path, pattern: str, appearances: int, delay: float = 0.0) -> Moment:
    """When files that match ``pattern`` below ``folder`` appear for the ``appearances``-th time in this process."""
    before = set(folder.glob(pattern))
    seen = 0
    came: list[float] = []

    def is_now(_: Started) -> bool:
        nonlocal before, seen
        now = set(folder.glob(pattern))
        seen += len(now - before)
        before = now
        if seen >= appearances and not came:
            came.append(time.monotonic())
        return bool(came) and time.monotonic() - came[0] >= delay

    return is_now


class Soak:
    """``fedbench run`` of the suite in ``folder``, two jobs, a checkpoint every second round."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = folder / "undisturbed"
        self._reference: dict[str, dict[str, Any]] = {}
        self._planned = 10.0
        self._starts = 0
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "soak.yaml").write_text(SUITE, encoding="utf-8")

    def undisturbed(self) -> None:
        """Carry it out once, as what the others are compared with."""
        started = self.start()
        while started.ended() is None:
            if not any(line.startswith("start") for line in started.lines):
                self._planned = started.age()
            time.sleep(0.05)
        started.close()
        self._reference = {} if started.ended() else stored(self._store)
        if len(self._reference) != RUNS:
            raise RuntimeError(f"{len(self._reference)} of {RUNS} runs were stored, see {started.output}")

    def start(self) -> Started:
        """The same command every time, but for where clients' states lie: undisturbed in memory, else in files."""
        self._starts += 1
        words = ["run", "--suite", "soak.yaml", "--store", self._store.name, "--jobs", "2", "--checkpoint-every", "2"]
        words += ["--cache-dir", "cache", *(("--state-memory", "0") if self._reference else ())]
        return Started(words, self._folder, self._folder / f"output-{self._starts:03d}.txt")

    def to_its_end(self, attempt: int, kills: Counter[str], wanted: int, rng: random.Random) -> list[str]:
        """Begin it in a new store, kill it until ``wanted`` kills are made in all, and say what differs at last."""
        self._store = self._folder / f"store-{attempt:02d}"
        hit = "group"
        while hit in ("group", "parent"):
            started, hit = self.start(), ""
            while hit not in ("group", "parent"):
                aimed, is_now = self._moment(rng) if kills.total() < wanted else ("never", lambda _: False)
                while started.ended() is None and not is_now(started):
                    time.sleep(_LOOK)
                if started.ended() is not None:
                    break
                age = started.age()
                # mostly everything at once, as a machine dies
                hit = started.kill(rng.choices(["group", "parent", "worker", "server"], [0.68, 0.12, 0.13, 0.07])[0])
                kills[f"{hit} at {aimed}"] += 1
                print(f"kill {kills.total()} of {wanted} (attempt {attempt}, {aimed}): {hit} after {age:.1f} s")
            started.close()
        failed = [f"exit code {started.ended()}, see {started.output}"] if started.ended() else []
        return [*failed, *compared(self._reference, stored(self._store)), *self._left_over(), *self._leaderboard()]

    def _moment(self, rng: random.Random) -> tuple[str, Moment]:
        """While it plans, between lines, within checkpoints and writes of the store, and at the end."""
        delay = rng.random() ** 2
        unfinished = self._store / "unfinished" / "soak" / "checkpoints"
        kinds: dict[str, tuple[float, Moment]] = {
            "planning": (0.12, at_time(rng.uniform(0.0, 1.1 * self._planned))),
            "line": (0.32, at_line(rng.randrange(1, 25), delay, "start", "round", "done")),
            "checkpoint": (0.2, at_file(unfinished, "*/.*.tmp", rng.randrange(1, 6))),
            "store": (0.2, at_file(self._store, "mlflow.db-journal", rng.randrange(1, 30))),
            "artifacts": (0.1, at_file(self._store, "artifacts/soak/*/artifacts/*", rng.randrange(1, 4), delay / 20)),
            "end": (0.06, at_line(1, 2 * delay, "embedded?train", "target", "#", "store")),
        }
        (chosen,) = rng.choices(list(kinds), [weight for weight, _ in kinds.values()])
        return chosen, kinds[chosen][1]

    def _leaderboard(self) -> list[str]:
        boards = []
        for folder in (self._folder / "undisturbed", self._store):
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


def main() -> int:
    """Kill it so often; every time it comes to its end, it begins anew. 1 where anything differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=4, metavar="N", help="default 4")
    parser.add_argument("--seed", type=int, metavar="INT", help="of the moments; drawn and told if left out")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="an empty one, kept; by default a temporary one")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    print(f"moments drawn with --seed {seed}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    rng, kills, attempt, differences = random.Random(seed), Counter[str](), 0, list[str]()
    with tempfile.TemporaryDirectory(prefix="fedbench-soak-") as temporary:
        soak = Soak(given.folder or Path(temporary))
        soak.undisturbed()
        while kills.total() < given.kills:
            attempt += 1
            found = soak.to_its_end(attempt, kills, given.kills, rng)
            print(
                f"attempt {attempt} came to its end: {len(found) or 'no'} differences", *found, sep="\n  ", flush=True
            )
            differences += found
    print(", ".join(f"{number} {where}" for where, number in kills.most_common()))
    if not differences:
        print("everything that was stored is what the undisturbed one stored")
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())

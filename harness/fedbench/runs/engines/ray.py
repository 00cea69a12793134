"""A Ray cluster: as many pieces of work side by side as fit on its nodes. A run is in a process of its worker there.

A piece of work is a streaming task: Ray hands on what it yields while it goes on, and afterwards how it ended. Workers
are sent fedbench, all packages that register methods and the plugin files, in one folder that goes first on their
import path, with the metadata by which methods are found. So a node needs nothing but the libraries.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.core.version import PACKAGE
from fedbench.kinds.registry import installed_plugins
from fedbench.plugins.provenance import code_hash, files_under, roots, versions, with_imports
from fedbench.runs.engines.engine import Processes, default_workers
from fedbench.runs.engines.events import Event, Lost, RunFailed, RunFinished
from fedbench.runs.engines.worker import last_line
from fedbench.runs.prepare import Settings

_REACHABLE = 10.0
"""Seconds that a cluster is given to answer; Ray itself tries for many minutes."""
_PLUGINS = "fedbench_plugin_files"
_SECRET = re.compile("TOKEN|KEY|SECRET|PASS|CREDENTIAL")


# --- what is sent


@dataclass(frozen=True)
class Shipped:
    """What a worker's code must be, and where the plugin files are in it."""

    code: str
    """`code_hash` of the process that sends it."""
    parts: tuple[tuple[str, str], ...]
    """Libraries with their versions, and packages that register methods."""
    plugin_files: tuple[str, ...]
    """Their paths in the folder that is sent."""

    def unpacked(self, settings: Settings) -> Settings:
        """``settings`` with the plugin files where they are here; FedbenchError where the code here is another."""
        files = tuple(PACKAGE.parent / file for file in self.plugin_files)
        if _is_here(self.code, files):
            return replace(settings, plugin_files=files)
        here, there = dict(_parts()), dict(self.parts)
        differences = [
            f"{name} {here.get(name, 'missing')} here and {there.get(name, 'missing')} there"
            for name in sorted({*here, *there})
            if here.get(name) != there.get(name)
        ]
        raise FedbenchError(
            "this worker's code is not that of the machine where the command was given: "
            f"{', '.join(differences) or 'its sources differ'}; install the same versions on every node."
        )


@lru_cache
def _is_here(code: str, plugin_files: tuple[Path, ...]) -> bool:
    return code_hash(plugin_files) == code


def _parts() -> tuple[tuple[str, str], ...]:
    packages = {f"package {name}": "registers methods" for name in roots()}
    return tuple(sorted((versions() | packages).items()))


def ship(folder: Path, plugin_files: Sequence[Path]) -> Shipped:
    """Copy into ``folder``, which is empty, what a worker needs. Raises FedbenchError where a source can't be read."""
    sent: dict[str, Path] = {}
    for number, plugin in enumerate(plugin_files):  # what it imports of packages is sent with these
        beside = with_imports(plugin, plugin.parent).items()
        own = {name: file for name, file in beside if file.is_relative_to(plugin.parent)}
        sent |= {f"{_PLUGINS}/{number}/{name}": file for name, file in own.items()}
        sent |= {name: file for name, file in own.items() if file != plugin}  # and where it is imported from
    suites = find_spec("fedbench_suites")
    for root in [*roots().values(), *([Path(suites.origin).parent] if suites and suites.origin else [])]:
        sent |= dict(files_under(root))
    try:
        for name, file in sent.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / name)
        for point in installed_plugins():  # found there under the names of the distributions that they come in
            name, version = ("unknown", "0") if point.dist is None else (point.dist.name, point.dist.version)
            target = folder / f"{re.sub(r'[-_.]+', '_', name)}-{version}.dist-info"
            target.mkdir(exist_ok=True)
            (target / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
            with (target / "entry_points.txt").open("a", encoding="utf-8") as points:
                points.write(f"[{point.group}]\n{point.name} = {point.value}\n")
    except (OSError, shutil.Error) as error:
        raise FedbenchError(f"the code can't be packed for the workers: {error}.") from error
    files = tuple(f"{_PLUGINS}/{number}/{file.name}" for number, file in enumerate(plugin_files))
    return Shipped(code_hash(plugin_files), _parts(), files)


def environment() -> dict[str, str]:
    """The environment variables that workers get: one thread each, and this process's settings, but no secrets."""
    ours = {name: value for name, value in os.environ.items() if name.startswith(("FEDBENCH_", "HF_"))}
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return threads | {name: value for name, value in ours.items() if not _SECRET.search(name)}


# --- on a worker


def run(shipped: Shipped, spec: RunSpec, settings: Settings) -> Iterator[bytes]:
    """Carry out a run; yields the node's address, then the run's events, all pickled."""
    yield pickle.dumps(where())
    try:
        settings = shipped.unpacked(settings)
    except FedbenchError as error:
        yield pickle.dumps(RunFailed(spec, str(error)))
        return
    with closing(Processes(settings, 1)) as engine:  # what a run does to its process meets no other
        engine.begin(spec)
        is_over = False
        while not is_over:
            for event in engine.wait(60.0):
                yield pickle.dumps(event)
                is_over |= isinstance(event, RunFinished | RunFailed | Lost)


def where() -> str:
    """This process, in words."""
    import ray

    util: Any = ray.util
    return f"{util.get_node_ip_address()} (process {os.getpid()})"


# --- where the command was given


@dataclass
class Task:
    """A run that was given to Ray."""

    spec: RunSpec
    place: str = ""
    """Address of its node, once it has begun."""


class RayCluster:
    """An engine: runs on the cluster at ``address`` ("auto", host:port), or on one that is started here, on loopback.

    Each takes ``run_cpus`` and ``run_gpus`` of a node; at most ``workers`` go on at once. Workers read data and keep
    checkpoints under the same paths as this machine. Where these are folders that all machines share, a run whose
    process died goes on from its checkpoint wherever it is tried again; else it may begin anew, with the same numbers.
    """

    def __init__(
        self, settings: Settings, address: str, run_cpus: float, run_gpus: float, workers: int | None = None
    ) -> None:
        """Raises FedbenchError where Ray is missing, no cluster is found, or no run fits on it."""
        if run_gpus > 1 and not float(run_gpus).is_integer():
            raise FedbenchError(f"--run-gpus {run_gpus:g}: above 1, it must be a whole number.")
        if not run_cpus and not run_gpus:
            raise FedbenchError("--run-cpus and --run-gpus are both 0; a run must ask for a share of something.")
        if address.startswith("ray://"):
            raise FedbenchError(
                f"--ray-address {address}: Ray's client protocol is not supported; give the command on a node of the "
                "cluster, with --ray-address auto."
            )
        self._cpus, self._gpus, self._most = run_cpus, run_gpus, workers
        self._settings = on_any_machine(settings, run_cpus)
        self._ray = _ray(is_started_here=not address)
        # several to a process, but one where it is given a GPU, whose memory only the end of the process frees
        asked = {"num_cpus": run_cpus, "num_gpus": run_gpus, "max_calls": 1 if run_gpus else 0}
        self._run = self._ray.remote(**asked)(run)
        self._tasks: dict[Any, Task] = {}
        """Tasks under way, by their streams."""
        with tempfile.TemporaryDirectory(prefix="fedbench-ray-") as folder:
            self.shipped: Shipped = ship(Path(folder), settings.plugin_files)
            self._connect(address, folder)
        if not self.room():
            has = [(node["NodeManagerAddress"], node["Resources"]) for node in self._alive()]
            nodes = [f"{place} with {of.get('CPU', 0):g} CPUs and {of.get('GPU', 0):g} GPUs" for place, of in has]
            self._ray.shutdown()
            raise FedbenchError(
                f"nothing can be run on this Ray cluster: a run asks for {run_cpus:g} CPUs and {run_gpus:g} GPUs of "
                f"one node (--run-cpus, --run-gpus), and the cluster has {'; '.join(nodes) or 'no node'}."
            )

    @property
    def is_one_machine(self) -> bool:
        return len(self.machines()) <= 1

    def room(self) -> int:
        """How many runs fit on the nodes as they are now, others' work apart; no more than requested."""
        return min(sum(map(self._fitting, self._alive())), sys.maxsize if self._most is None else self._most)

    def slots(self) -> int:
        return max(self.room(), 1)  # where all nodes were lost, a run waits for one

    def machines(self) -> set[str]:
        """The addresses of the machines on which something fits."""
        return {node["NodeManagerAddress"] for node in self._alive() if self._fitting(node)}

    def has_room(self, spec: RunSpec, *, alone: bool = False) -> bool:
        return True  # Ray lets it wait

    def begin(self, spec: RunSpec, *, alone: bool = False) -> None:
        """Begin a run on some node. Raises FedbenchError for one on a GPU where none is set aside for it."""
        check_device(spec, self._gpus)
        options = {"num_returns": "streaming", "max_retries": 0, "scheduling_strategy": "SPREAD"}
        options["name"] = f"{spec.method} seed {spec.seed}"
        if alone and self._gpus:
            options["num_gpus"] = max(self._gpus, 1)
        self._tasks[self._run.options(**options).remote(self.shipped, spec, self._settings)] = Task(spec)

    def wait(self, seconds: float) -> list[Event | Lost]:
        if not self._tasks:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(list(self._tasks), num_returns=1, timeout=seconds)
        if ready:  # and all others that are ready as well
            ready, _ = self._ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=0)
        return [event for stream in ready for event in self._events(stream)]

    def has_begun(self, spec: RunSpec) -> bool:
        """Whether a worker has taken the run; on a cluster that others use it may have to wait for one."""
        return any(task.place for task in self._tasks.values() if task.spec.run_id == spec.run_id)

    def stop(self, spec: RunSpec, *, gently: bool = False) -> list[Event | Lost]:
        for stream in [stream for stream, task in self._tasks.items() if task.spec.run_id == spec.run_id]:
            self._cancel(stream)
        return []

    def clear(self) -> None: ...  # the workers are Ray's

    def close(self) -> None:
        """End everything under way, and leave the cluster, or end it where it was started here."""
        for stream in list(self._tasks):
            self._cancel(stream)
        self._ray.shutdown()

    def _cancel(self, stream: Any) -> None:
        """End a task's process; nothing further is read of it."""
        del self._tasks[stream]
        self._ray.cancel(stream, force=True)

    def _events(self, stream: Any) -> list[Event | Lost]:
        """The next message of a task; none where it only says on which node it is."""
        errors, task = self._ray.exceptions, self._tasks[stream]
        try:
            message = pickle.loads(self._ray.get(next(stream)))
        except errors.RayTaskError as error:
            del self._tasks[stream]
            reason = f"it can't be run on its worker: {last_line(str(error))}"
            return [RunFailed(task.spec, reason, str(error))]
        except (StopIteration, errors.RayError) as error:
            del self._tasks[stream]
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            return [Lost(task.spec, f"Ray lost its process {f'on {task.place}' if task.place else ''}: {why}")]
        if not task.place:
            task.place = message
            return []
        if isinstance(message, RunFinished | RunFailed | Lost):
            del self._tasks[stream]
        return [message]

    def _connect(self, address: str, folder: str) -> None:
        options: dict[str, Any] = {"address": address}
        if not address:
            cores = default_workers()
            most = cores if self._most is None else max(cores, math.ceil(self._most * self._cpus))
            options = {"address": "local", "num_cpus": most, "include_dashboard": False}
        try:
            if address not in ("", "auto"):
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=_REACHABLE).close()
            # where a folder is sent, Ray does not add the current one to the workers' import path
            sent = {"working_dir": folder, "env_vars": environment()}
            self._ray.init(**options, logging_level="error", log_to_driver=True, runtime_env=sent)
        except (self._ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
            self._ray.shutdown()
            told = f"--ray-address {address}: no Ray cluster can be joined there" if address else "Ray can't start"
            raise FedbenchError(
                f"{told} ({' '.join(str(error).split())[:300]}); this machine must be a node of the cluster: `ray "
                "start --head` on the first, `ray start --address HOST:PORT` on the others."
            ) from error
        self.here: str = self._ray.util.get_node_ip_address()
        """The address of this machine."""
        if not address and self.here != "127.0.0.1":
            self._ray.shutdown()
            raise FedbenchError(
                f"Ray would listen on {self.here}, where others can reach it, since it was imported before "
                "fedbench; start a cluster with `ray start --head` and give --ray-address auto."
            )

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _fitting(self, node: Mapping[str, Any]) -> int:
        """How many runs fit on a node."""
        cpus, gpus = (node["Resources"].get(kind, 0.0) for kind in ("CPU", "GPU"))
        counts = [math.floor(cpus / self._cpus + 1e-9)] if self._cpus else []
        if self._gpus:  # a share of a GPU can't be put together from two
            each = math.floor(1 / self._gpus + 1e-9)
            counts.append(math.floor(gpus) * each if self._gpus < 1 else math.floor(gpus / self._gpus))
        return int(min(counts))


def check_device(spec: RunSpec, gpus: float) -> None:
    """Raise FedbenchError for a run on a GPU that is not among the ``gpus`` set aside for it."""
    kind, _, index = spec.device.partition(":")
    if kind == "cuda" and not gpus:
        raise FedbenchError(
            f"{spec.title} is to run on device={spec.device}, but no GPU is set aside for a run, and Ray hides "
            "GPUs from it then; give --run-gpus 1, or a share such as 0.25."
        )
    if kind == "cuda" and index.isdigit() and int(index) >= gpus:
        raise FedbenchError(
            f"device={spec.device} is not among the {gpus:g} GPUs of a run (--run-gpus), which are numbered "
            f"from 0 for each; set device={kind}."
        )


def on_any_machine(settings: Settings, cpus: float) -> Settings:
    """``settings`` that mean the same in every current folder, with as many cores as a piece of work has to itself."""
    kept = settings.checkpoints
    return replace(
        settings,
        data_dir=settings.data_dir.absolute(),
        cache_dir=settings.cache_dir.absolute(),
        plugin_files=(),
        cores=max(int(cpus), 1),
        checkpoints=None if kept is None else replace(kept, folder=kept.folder.absolute()),
    )


def _ray(*, is_started_here: bool) -> Any:
    """The library. Raises FedbenchError where it is missing, or where this process uses a cluster already."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if is_started_here and "ray" not in sys.modules:
        # Ray binds all interfaces where several machines might join; this switch, read on import, says that none will
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        hint = 'pip install "fedbench-harness[ray]"'
        raise FedbenchError(f"--engine ray needs the library Ray, which is not installed; {hint}.") from error
    if ray.is_initialized():
        raise FedbenchError("this process has joined a Ray cluster already; leave it with ray.shutdown() first.")
    return ray

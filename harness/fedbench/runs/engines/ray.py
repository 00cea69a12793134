"""A Ray cluster: as many pieces of work side by side as fit on its nodes. A run is in a process of its worker there.

A piece of work is a streaming task: Ray hands on what it yields while it goes on, and afterwards how it ended. Workers
are sent fedbench, all packages that register methods and the plugin files, in one folder that goes first on their
import path, with the metadata by which methods are found. So a node needs nothing but the libraries.
"""

from __future__ import annotations

import math
import os
import pickle
import queue
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.core.version import PACKAGE
from fedbench.kinds.registry import installed_plugins
from fedbench.plugins.provenance import files_under, roots, versions
from fedbench.plugins.run_code import PLUGIN, code_hash, files_beside
from fedbench.runs.checkpoint import Checkpointing, discard
from fedbench.runs.engines.engine import Processes, default_workers
from fedbench.runs.engines.events import Event, Lost, RunFailed, RunFinished
from fedbench.runs.engines.worker import Notice, last_line
from fedbench.runs.prepare import Settings

_REACHABLE = 10.0
"""Seconds that a cluster is given to answer."""
_NO_ROOM = 600.0
"""Seconds without a node on which anything fits, after nodes were lost, before this is an error."""
_PLUGINS = "fedbench_plugin_files"
_SECRET = re.compile("TOKEN|KEY|SECRET|PASS|CREDENTIAL")


# --- what is sent


@dataclass(frozen=True)
class Shipped:
    """What a worker's code must be, and where the plugin files are in it."""

    code: str
    """`code_hash` of the process that sends it."""
    versions: tuple[tuple[str, str], ...]
    packages: tuple[str, ...]
    """Those that register methods."""
    plugin_files: tuple[str, ...]
    """Their paths in the folder that is sent."""

    def unpacked(self, settings: Settings) -> Settings:
        """``settings`` with the plugin files where they are here; FedbenchError where the code here is another."""
        files = tuple(PACKAGE.parent / file for file in self.plugin_files)
        if difference := _difference(self, files):
            raise FedbenchError(
                f"this worker's code is not that of the machine where the command was given: {difference}; install "
                "the same versions on every node."
            )
        return replace(settings, plugin_files=files)


def ship(folder: Path, plugin_files: Sequence[Path]) -> Shipped:
    """Copy into ``folder``, which is empty, what a worker needs. Raises FedbenchError where a source can't be read."""
    packages, suites = roots(), find_spec("fedbench_suites")
    sent = {re.sub(f"^{PLUGIN}/", f"{_PLUGINS}/", name): file for name, file in files_beside(plugin_files).items()}
    for root in [*packages.values(), *([Path(suites.origin).parent] if suites and suites.origin else [])]:
        sent |= dict(files_under(root))
    try:
        for name, file in sent.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / name)
        _write_metadata(folder)
    except (OSError, shutil.Error) as error:
        raise FedbenchError(f"the code can't be packed for the workers: {error}.") from error
    files = tuple(f"{_PLUGINS}/{number}/{file.name}" for number, file in enumerate(plugin_files))
    return Shipped(code_hash(plugin_files), tuple(sorted(versions().items())), tuple(sorted(packages)), files)


def _write_metadata(folder: Path) -> None:
    """Let the plug-ins' entry points be found in ``folder``, under the names of the distributions they come in."""
    for point in installed_plugins():
        name, version = ("unknown", "0") if point.dist is None else (point.dist.name, point.dist.version)
        target = folder / f"{re.sub(r'[-_.]+', '_', name)}-{version}.dist-info"
        target.mkdir(exist_ok=True)
        (target / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
        with (target / "entry_points.txt").open("a", encoding="utf-8") as points:
            points.write(f"[{point.group}]\n{point.name} = {point.value}\n")


def environment() -> dict[str, str]:
    """The environment variables that workers get: one thread each, and this process's settings, but no secrets."""
    ours = {name: value for name, value in os.environ.items() if name.startswith(("FEDBENCH_", "HF_"))}
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return threads | {name: value for name, value in ours.items() if not _SECRET.search(name)}


@lru_cache
def _difference(shipped: Shipped, plugin_files: tuple[Path, ...]) -> str:
    """What is different here, named by both sides; "" where nothing is."""
    here = code_hash(plugin_files)
    if here == shipped.code:
        return ""
    ours = versions() | dict.fromkeys(map("package {}".format, roots()), "registers methods")
    theirs = dict(shipped.versions) | dict.fromkeys(map("package {}".format, shipped.packages), "registers methods")
    differences = [
        f"{name} {ours.get(name, 'missing')} here and {theirs.get(name, 'missing')} there"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    return ", ".join(differences) or f"its sources have the hash {here[:16]} here and {shipped.code[:16]} there"


# --- on a worker


def stream(body: Callable[..., None], *arguments: Any) -> Iterator[bytes]:
    """Carry out ``body(*arguments, emit)`` in a thread; pickled, where that is, and then all that it emits."""
    import ray

    util: Any = ray.util
    yield pickle.dumps(f"{util.get_node_ip_address()} (process {os.getpid()})")
    emitted: queue.SimpleQueue[Any] = queue.SimpleQueue()
    end, raised = object(), []

    def carry_out() -> None:
        try:
            body(*arguments, emitted.put)
        except BaseException as error:  # raised again for whoever reads the stream
            raised.append(error)
        emitted.put(end)

    threading.Thread(target=carry_out, name="fedbench-work", daemon=True).start()
    while (event := emitted.get()) is not end:
        yield pickle.dumps(event)
    if raised:
        raise raised[0]


def run(
    shipped: Shipped, marker: Path | None, spec: RunSpec, settings: Settings, emit: Callable[[Event | Lost], None]
) -> None:
    """One attempt at a run. The checkpoints of a finished one go from a disk that does not have the file ``marker``.

    Where the folder is shared, whoever gave the command deletes them once the results are stored.
    """
    try:
        engine = _processes(shipped.unpacked(settings))
    except FedbenchError as error:
        emit(RunFailed(spec, str(error)))
        return
    engine.begin(spec)
    is_over = False
    while not is_over:
        for event in engine.wait(60.0):
            emit(event)
            is_over |= isinstance(event, RunFinished | RunFailed | Lost)
            if isinstance(event, RunFinished) and settings.checkpoints and marker and not marker.exists():
                discard(settings.checkpoints.folder, spec.run_id)


_engines: list[tuple[Settings, Processes]] = []


def _processes(settings: Settings) -> Processes:
    """What carries out runs on this worker: the same for all runs of a command, which have the same settings."""
    if not _engines or _engines[0][0] != settings:
        for _, others in _engines:
            others.close()
        _engines[:] = [(settings, Processes(settings, 1))]
    return _engines[0][1]


# --- where the command was given


@dataclass(eq=False)
class Task:
    """A piece of work that was given to Ray."""

    stream: Any
    place: str = ""
    """Known once it has begun."""


class RayNodes:
    """The cluster at ``address`` ("auto", host:port), or one that is started here and listens on loopback alone.

    A piece of work takes ``cpus`` and ``gpus`` of a node. ``most`` is how many there may be at the same time.
    """

    def __init__(
        self, address: str, cpus: float, gpus: float, most: int | None, plugin_files: tuple[Path, ...]
    ) -> None:
        """Raises FedbenchError where Ray is missing, no cluster is found, or nothing fits on it."""
        if gpus > 1 and not float(gpus).is_integer():
            raise FedbenchError(f"--run-gpus {gpus:g}: above 1, it must be a whole number.")
        if not cpus and not gpus:
            raise FedbenchError("--run-cpus and --run-gpus are both 0; a run must ask for a share of something.")
        if address.startswith("ray://"):
            raise FedbenchError(
                f"--ray-address {address}: Ray's client protocol is not supported; give the command on a node of the "
                "cluster, with --ray-address auto."
            )
        self._cpus, self._gpus, self._most = cpus, gpus, most
        self._ray = _ray(is_started_here=not address)
        self._under_way: list[Task] = []
        self._had_room = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fedbench-ray-") as folder:
            self.shipped: Shipped = ship(Path(folder), plugin_files)
            self._connect(address, folder)
        if not self.room():
            shortage = self._shortage()
            self.close()
            raise FedbenchError(f"nothing can be run on this Ray cluster: {shortage}")
        # several to a process, but one where it is given a GPU, whose memory only the end of the process frees
        self._stream = self._ray.remote(num_cpus=cpus, num_gpus=gpus, max_calls=1 if gpus else 0)(stream)

    def room(self) -> int:
        """How many pieces of work fit on the nodes as they are now, others' work apart; no more than requested."""
        fitting = sum(map(self._fitting, self._alive()))
        return fitting if self._most is None else min(fitting, self._most)

    def slots(self) -> int:
        """`room`; FedbenchError once there has been none for long."""
        room = self.room()
        if room or self._under_way:
            self._had_room = time.monotonic()
        elif time.monotonic() - self._had_room > _NO_ROOM:
            raise FedbenchError(
                f"the Ray cluster has lost its nodes: {self._shortage()} What is finished is kept; the same command "
                "goes on."
            )
        return room

    def machines(self) -> set[str]:
        """The addresses of the machines on which something fits."""
        return {node["NodeManagerAddress"] for node in self._alive() if self._fitting(node)}

    def begin(self, name: str, body: Callable[..., None], *arguments: Any) -> Task:
        """Let ``body(*arguments, emit)`` be carried out on some node; ``name`` is what Ray's logs call it."""
        options = {"num_returns": "streaming", "max_retries": 0, "scheduling_strategy": "SPREAD", "name": name}
        self._under_way.append(Task(self._stream.options(**options).remote(body, *arguments)))
        return self._under_way[-1]

    def wait(self, seconds: float) -> list[Notice]:
        """What has happened to the tasks under way, in order for each; waits up to ``seconds`` for something."""
        by_stream = {task.stream: task for task in self._under_way}
        if not by_stream:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(list(by_stream), num_returns=1, timeout=seconds)
        if ready:  # and all others that are ready as well
            ready, _ = self._ray.wait(list(by_stream), num_returns=len(by_stream), timeout=0)
        return [self._next(by_stream[stream]) for stream in ready]

    def stop(self, task: Task) -> None:
        """End a task's process; there is no further notice of it."""
        if task in self._under_way:
            self._under_way.remove(task)
            self._ray.cancel(task.stream, force=True)

    def close(self) -> None:
        """End everything under way, and leave the cluster, or end it where it was started here."""
        for task in list(self._under_way):
            self.stop(task)
        self._ray.shutdown()

    def _connect(self, address: str, folder: str) -> None:
        options: dict[str, Any] = {"address": address}
        if not address:
            cores = default_workers()
            most = cores if self._most is None else max(cores, math.ceil(self._most * self._cpus))
            options = {"address": "local", "num_cpus": most, "include_dashboard": False}
        try:
            if address not in ("", "auto"):  # Ray itself tries for many minutes
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=_REACHABLE).close()
            # where a folder is sent, Ray does not add the current one to the workers' import path
            sent = {"working_dir": folder, "env_vars": environment()}
            self._ray.init(**options, logging_level="error", log_to_driver=True, runtime_env=sent)
        except (self._ray.exceptions.RayError, ConnectionError, OSError, RuntimeError, ValueError) as error:
            self._ray.shutdown()
            message = " ".join(str(error).split())[:300]
            if not address:
                raise FedbenchError(f"Ray can't be started on this machine: {message}") from error
            raise FedbenchError(
                f"--ray-address {address}: no Ray cluster can be joined there ({message}); this machine must be one of "
                "its nodes: `ray start --head` on the first, `ray start --address HOST:PORT` on the others."
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
        """How many pieces of work fit on a node."""
        cpus, gpus = (node["Resources"].get(kind, 0.0) for kind in ("CPU", "GPU"))
        counts = [math.floor(cpus / self._cpus + 1e-9)] if self._cpus else []
        if self._gpus:  # a share of a GPU can't be put together from two
            each = math.floor(1 / self._gpus + 1e-9)
            counts.append(math.floor(gpus) * each if self._gpus < 1 else math.floor(gpus / self._gpus))
        return int(min(counts))

    def _shortage(self) -> str:
        nodes = [
            f"{node['NodeManagerAddress']} with {node['Resources'].get('CPU', 0):g} CPUs and "
            f"{node['Resources'].get('GPU', 0):g} GPUs"
            for node in self._alive()
        ]
        return (
            f"a run asks for {self._cpus:g} CPUs and {self._gpus:g} GPUs of one node (--run-cpus, --run-gpus), and the "
            f"cluster has {'; '.join(nodes) or 'no node'}."
        )

    def _next(self, task: Task) -> Notice:
        errors = self._ray.exceptions
        try:
            message = pickle.loads(self._ray.get(next(task.stream)))
        except (StopIteration, errors.RayError) as error:
            self._under_way.remove(task)
            if isinstance(error, errors.RayTaskError):
                return Notice(task, is_over=True, broken=str(error))
            lost = "" if isinstance(error, StopIteration) else _loss_text(error, task.place, errors)
            return Notice(task, is_over=True, lost=lost)
        if task.place:
            return Notice(task, (message,))
        task.place = message
        return Notice(task)


class RayCluster:
    """An engine: runs on `RayNodes`. Each takes ``run_cpus`` and ``run_gpus``; at most ``workers`` go on at once.

    Workers read data and keep checkpoints under the same paths as this machine. Where these are folders that all
    machines share, a run whose process died goes on from its checkpoint wherever it is tried again; else it may begin
    anew, with the same numbers.
    """

    def __init__(
        self, settings: Settings, address: str, run_cpus: float, run_gpus: float, workers: int | None = None
    ) -> None:
        """Raises FedbenchError where Ray is missing, no cluster is found, or no run fits on it."""
        self._gpus = run_gpus
        self._nodes = RayNodes(address, run_cpus, run_gpus, workers, settings.plugin_files)
        self._settings = on_any_machine(settings, run_cpus)
        self._marker = _mark(self._settings.checkpoints)
        self._runs: dict[Task, RunSpec] = {}

    @property
    def is_one_machine(self) -> bool:
        """Whether all runs share the memory of one machine."""
        return len(self._nodes.machines()) <= 1

    def slots(self) -> int:
        """How many runs fit on the nodes that are there now."""
        return self._nodes.slots()

    def begin(self, spec: RunSpec) -> None:
        """Begin a run on some node. Raises FedbenchError for one on a GPU where none is set aside for it."""
        check_device(spec, self._gpus)
        given = (self._nodes.shipped, self._marker, spec, self._settings)
        self._runs[self._nodes.begin(f"{spec.method} seed {spec.seed}", run, *given)] = spec

    def wait(self, seconds: float) -> list[Event | Lost]:
        """Events of all runs; `Lost` for each whose process, or node, ended before it did."""
        return [event for notice in self._nodes.wait(seconds) for event in self._events(notice)]

    def has_begun(self, spec: RunSpec) -> bool:
        """Whether a worker has taken the run; on a cluster that others use it may have to wait for one."""
        return any(task.place for task, its in self._runs.items() if its.run_id == spec.run_id)

    def stop(self, spec: RunSpec, *, gently: bool = False) -> None:
        """End the process that has the run."""
        for task in [task for task, its in self._runs.items() if its.run_id == spec.run_id]:
            self._nodes.stop(task)
            del self._runs[task]

    def close(self) -> None:
        """End all runs; leave the cluster, or end it where it was started here."""
        if self._marker is not None:
            self._marker.unlink(missing_ok=True)
        self._nodes.close()

    def _events(self, notice: Notice) -> list[Event | Lost]:
        spec = self._runs.get(notice.task)
        if spec is None:
            return []
        events: list[Event | Lost] = list(notice.events)
        if notice.broken:
            events.append(RunFailed(spec, f"it can't be run on its worker: {last_line(notice.broken)}", notice.broken))
        elif notice.is_over:
            events.append(Lost(spec, notice.lost or "its worker ended without a word"))
        if any(isinstance(event, RunFinished | RunFailed | Lost) for event in events):
            del self._runs[notice.task]
        return events


def check_device(spec: RunSpec, gpus: float) -> None:
    """Raise FedbenchError for a run on a GPU that is not among the ``gpus`` set aside for it."""
    kind, _, index = spec.device.partition(":")
    if kind != "cuda":
        return
    if not gpus:
        raise FedbenchError(
            f"{spec.title} is to run on device={spec.device}, but no GPU is set aside for a run, and Ray hides "
            "GPUs from it then; give --run-gpus 1, or a share such as 0.25."
        )
    if index.isdigit() and int(index) >= gpus:
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


def _mark(checkpoints: Checkpointing | None) -> Path | None:
    """A new file in the folder of checkpoints; None where none can be made."""
    if checkpoints is None:
        return None
    marker = checkpoints.folder / f"shared-{uuid.uuid4().hex}"
    try:
        checkpoints.folder.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError:
        return None
    return marker


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


def _loss_text(error: Exception, place: str, errors: Any) -> str:
    """Why a task was lost, in words."""
    where = f"on {place}" if place else "before it began"
    reasons = {
        errors.WorkerCrashedError: "its process {} died; was it killed, or is there too little memory?",
        errors.OutOfMemoryError: "its process {} was ended by Ray, which found too little memory left on the machine",
        errors.NodeDiedError: "its node was lost, with its process {}",
        errors.LocalRayletDiedError: "its node was lost, with its process {}",
    }
    message = f"Ray lost its process {where}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return next((reason.format(where) for kind, reason in reasons.items() if isinstance(error, kind)), message)

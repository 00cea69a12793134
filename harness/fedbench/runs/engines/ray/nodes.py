"""A Ray cluster: starting or joining one, what fits on it, and pieces of work that are under way on it."""

from __future__ import annotations

import math
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedbench.core.errors import FedbenchError
from fedbench.runs.engines.engine import default_workers
from fedbench.runs.engines.ray.shipping import Shipped, environment, ship
from fedbench.runs.engines.ray.worker import Message, PlaceOfWork, stream
from fedbench.runs.engines.worker import Notice

_INSTALL = 'pip install "fedbench-harness[ray]"'
_REACHABLE = 10.0
"""Seconds that a cluster is given to answer."""
_NO_ROOM = 600.0
"""Seconds without a node on which anything fits, after nodes were lost, before this is an error."""


@dataclass(eq=False)
class Task:
    """A piece of work that was given to Ray."""

    stream: Any
    place: PlaceOfWork | None = None
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
        try:
            if not self.room():
                raise FedbenchError(f"nothing can be run on this Ray cluster: {self._reported_shortage()}")
        except BaseException:
            self.close()
            raise
        # several to a process, but one where it is given a GPU, whose memory only the end of the process frees
        self._stream = self._ray.remote(num_cpus=cpus, num_gpus=gpus, max_calls=1 if gpus else 0)(stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def room(self) -> int:
        """How many pieces of work fit on the nodes as they are now, others' work apart; no more than requested."""
        fitting = sum(self._fitting(node) for node in self.alive())
        return fitting if self._most is None else min(fitting, self._most)

    def slots(self) -> int:
        """`room`; FedbenchError once there has been none for long."""
        room = self.room()
        if room or self._under_way:
            self._had_room = time.monotonic()
        elif time.monotonic() - self._had_room > _NO_ROOM:
            raise FedbenchError(
                f"the Ray cluster has lost its nodes: {self._reported_shortage()} What is finished is kept; the same "
                "command goes on."
            )
        return room

    def machines(self) -> set[str]:
        """The addresses of the machines on which something fits."""
        return {node["NodeManagerAddress"] for node in self.alive() if self._fitting(node)}

    def alive(self) -> list[dict[str, Any]]:
        """Ray's description of each node that is there."""
        return [node for node in self._ray.nodes() if node["Alive"]]

    def begin(self, name: str, body: Callable[..., None], *arguments: Any) -> Task:
        """Let ``body(*arguments, emit)`` be carried out on some node; ``name`` is what Ray's logs call it."""
        options = {"num_returns": "streaming", "max_retries": 0, "scheduling_strategy": "SPREAD", "name": name}
        self._under_way.append(Task(self._stream.options(**options).remote(body, *arguments)))
        return self._under_way[-1]

    def begin_on(self, node: str, body: Callable[..., None], *arguments: Any) -> Task:
        """The same on one node, beside what it does."""
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_returns": "streaming", "max_retries": 0, "scheduling_strategy": strategy, "num_cpus": 0}
        self._under_way.append(Task(self._stream.options(num_gpus=0, **options).remote(body, *arguments)))
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
            options = {
                "address": "local",
                "num_cpus": cores if self._most is None else max(cores, math.ceil(self._most * self._cpus)),
                "include_dashboard": False,
            }
        try:
            if address not in ("", "auto"):
                _reach(address)  # Ray itself tries for many minutes
            self._ray.init(
                **options,
                logging_level="error",
                log_to_driver=True,
                # where a folder is sent, Ray does not add the current one to the workers' import path
                runtime_env={"working_dir": folder, "env_vars": environment()},
            )
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

    def _fitting(self, node: Mapping[str, Any]) -> int:
        """How many pieces of work fit on a node."""
        has = node["Resources"]
        counts = []
        if self._cpus:
            counts.append(math.floor(has.get("CPU", 0.0) / self._cpus + 1e-9))
        if self._gpus:
            gpus = has.get("GPU", 0.0)
            # a share of a GPU can't be put together from two
            each = math.floor(1 / self._gpus + 1e-9)
            counts.append(math.floor(gpus) * each if self._gpus < 1 else math.floor(gpus / self._gpus))
        return int(min(counts))

    def _reported_shortage(self) -> str:
        nodes = [
            f"{node['NodeManagerAddress']} with {node['Resources'].get('CPU', 0):g} CPUs and "
            f"{node['Resources'].get('GPU', 0):g} GPUs"
            for node in self.alive()
        ]
        return (
            f"a run asks for {self._cpus:g} CPUs and {self._gpus:g} GPUs of one node (--run-cpus, --run-gpus), and the "
            f"cluster has {'; '.join(nodes) or 'no node'}."
        )

    def _next(self, task: Task) -> Notice:
        exceptions = self._ray.exceptions
        try:
            message: Message = pickle.loads(self._ray.get(next(task.stream)))
        except StopIteration:
            self._under_way.remove(task)
            return Notice(task, is_over=True)
        except exceptions.RayTaskError as error:
            self._under_way.remove(task)
            return Notice(task, is_over=True, broken=str(error))
        except exceptions.RayError as error:
            self._under_way.remove(task)
            return Notice(task, is_over=True, lost=_loss_text(error, task.place, exceptions))
        task.place = message.place or task.place
        return Notice(task, message.events)


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
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise FedbenchError(f"--engine ray needs the library Ray, which is not installed; {_INSTALL}.") from error
    if ray.is_initialized():
        raise FedbenchError("this process has joined a Ray cluster already; leave it with ray.shutdown() first.")
    return ray


def _reach(address: str) -> None:
    """Raise OSError or ValueError where nothing listens at ``address``."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=_REACHABLE).close()


def _loss_text(error: Exception, place: PlaceOfWork | None, exceptions: Any) -> str:
    """Why a task was lost, in words."""
    where = "before it began" if place is None else f"on {place.address} (process {place.process})"
    if isinstance(error, exceptions.WorkerCrashedError):
        return f"its process {where} died; was it killed, or is there too little memory?"
    if isinstance(error, exceptions.OutOfMemoryError):
        return f"its process {where} was ended by Ray, which found too little memory left on the machine"
    if isinstance(error, exceptions.NodeDiedError | exceptions.LocalRayletDiedError):
        return f"its node was lost, with its process {where}"
    message = " ".join(str(error).split())[:300]
    return f"Ray lost its process {where}: {type(error).__name__}: {message}"

"""As much of Ray as fedbench calls, with a thread for each worker: what fedbench makes of its answers, in no time.

`test_ray.py` has the real one.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class RayError(Exception):
    """Of which all of Ray's own are."""


ERRORS = {
    name: type(name, (RayError,), {})
    for name in ("RayTaskError", "WorkerCrashedError", "OutOfMemoryError", "NodeDiedError", "LocalRayletDiedError")
}


class Stream:
    """What a streaming task returns: values one after the other, then its end or an error."""

    def __init__(self, values: Iterator[Any], lost: Exception | None, after: int) -> None:
        self._values, self._lost, self._left = values, lost, after
        self._waiting: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def is_ready(self) -> bool:
        return not self._waiting.empty()

    def __next__(self) -> Any:
        return self._waiting.get()

    def _run(self) -> None:
        end: Exception = StopIteration()
        try:
            while self._lost is None or self._left:
                self._waiting.put(next(self._values))
                self._left -= 1
            end = self._lost
        except StopIteration:
            pass
        except Exception as error:
            end = ERRORS["RayTaskError"](repr(error))
        self._waiting.put(end)


class FakeRay(ModuleType):
    """The module ``ray`` of a process that is a node of a cluster; ``lose`` has the next task end with an error."""

    def __init__(self, machines: Mapping[str, Mapping[str, float]]) -> None:
        super().__init__("ray")
        self.machines, self.here = dict(machines), next(iter(machines), "127.0.0.1")
        self.options: list[dict[str, Any]] = []
        self.cancelled: list[Stream] = []
        self.lost: list[tuple[Exception, int]] = []
        self.exceptions = SimpleNamespace(RayError=RayError, **ERRORS)
        self.util = SimpleNamespace(get_node_ip_address=lambda: self.here)
        self._is_initialized = False

    def lose(self, kind: str, text: str = "", after: int = 1) -> None:
        """Let the next task end with an error of that kind once it has yielded so many messages."""
        self.lost.append((ERRORS[kind](text), after))

    def is_initialized(self) -> bool:
        return self._is_initialized

    def init(self, **options: Any) -> None:
        if options["address"] == "nobody:1":
            raise ConnectionError("nobody there")
        self.options.append(options)
        self._is_initialized = True

    def shutdown(self) -> None:
        self._is_initialized = False

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": True, "NodeManagerAddress": address, "Resources": dict(has)}
            for address, has in self.machines.items()
        ]

    def remote(self, **_: Any) -> Callable[[Callable[..., Iterator[Any]]], SimpleNamespace]:
        def decorated(function: Callable[..., Iterator[Any]]) -> SimpleNamespace:
            def options(**given: Any) -> SimpleNamespace:
                self.options.append(given)
                return SimpleNamespace(remote=lambda *arguments: self._begun(function(*arguments)))

            return SimpleNamespace(options=options)

        return decorated

    def wait(self, streams: list[Stream], num_returns: int, timeout: float) -> tuple[list[Stream], list[Stream]]:
        pause, left = threading.Event(), timeout
        while not any(stream.is_ready() for stream in streams) and left > 0:
            pause.wait(0.01)
            left -= 0.01
        ready = [stream for stream in streams if stream.is_ready()][:num_returns]
        return ready, [stream for stream in streams if stream not in ready]

    def get(self, value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    def cancel(self, stream: Stream, force: bool) -> None:
        assert force
        self.cancelled.append(stream)

    def _begun(self, values: Iterator[Any]) -> Stream:
        error, after = self.lost.pop(0) if self.lost else (None, 0)
        return Stream(values, error, after)


def installed(patch: pytest.MonkeyPatch, machines: Mapping[str, Mapping[str, float]]) -> FakeRay:
    """The fake in Ray's place, on a cluster of ``machines`` by address, the first of them this one."""
    ray = FakeRay(machines)
    patch.setitem(sys.modules, "ray", ray)
    patch.setitem(sys.modules, "ray.exceptions", ray.exceptions)
    return ray

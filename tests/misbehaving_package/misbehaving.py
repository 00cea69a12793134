"""Methods that go wrong: each answers `aggregate` as FedAvg does in round 1, and misbehaves in round 2."""

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from fedbench.api import AggregationTask, hookimpl
from fedbench.toolkit.fedavg import average


@dataclass(frozen=True, kw_only=True)
class NoParams:
    """None."""


class Misbehaving:
    """What they have in common."""

    citation = "nobody"
    Params = NoParams
    recipe: dict[str, object] = {}

    def __init__(self, params: NoParams) -> None:
        self.params = params

    @hookimpl
    def aggregate(self, task: AggregationTask):
        """FedAvg's answer, and worse from round 2 on."""
        return average(task) if task.round < 2 else self.misbehave(task)


class Raises(Misbehaving):
    """Raises an exception."""

    name = "bad-raises"

    def misbehave(self, task: AggregationTask):
        """A bug like any other; brackets are no markup, angles no HTML."""
        raise KeyError("no such [bold]thing[/bold] <b>here</b>")


class LeavesPython(Misbehaving):
    """Asks Python to end, which `except Exception` does not see."""

    name = "bad-system-exit"

    def misbehave(self, task: AggregationTask):
        """As a script would."""
        raise SystemExit("enough")


class Hangs(Misbehaving):
    """Never comes back."""

    name = "bad-hangs"

    def misbehave(self, task: AggregationTask):
        """Deaf to polite requests as well."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)


class TurnsIntoNaN(Misbehaving):
    """Loses its numbers on the server, where no loss is looked at."""

    name = "bad-nan"

    def misbehave(self, task: AggregationTask):
        """All weights are NaN."""
        return {name: torch.full_like(tensor, float("nan")) for name, tensor in task.weights.items()}


class Dies(Misbehaving):
    """Takes its process along."""

    name = "bad-dies"

    def misbehave(self, task: AggregationTask):
        """No exception, no last word."""
        os._exit(3)


class DiesOnce(Misbehaving):
    """Is killed from outside the first time, as by a system short of memory."""

    name = "bad-dies-once"

    def misbehave(self, task: AggregationTask):
        """A file tells whether it was killed before."""
        been_here = Path(os.environ["FEDBENCH_TEST_MARKS"]) / f"{task.spec.run_id}.killed"
        if not been_here.exists():
            been_here.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return average(task)


class Leaks(Misbehaving):
    """Keeps 2 GB that nobody gets back."""

    name = "bad-leaks"
    kept: list[torch.Tensor] = []

    def misbehave(self, task: AggregationTask):
        """Written to, so that they are really taken."""
        if task.round == 2:
            Leaks.kept += [torch.ones(2**26) for _ in range(8)]
        return average(task)


class ReturnsWrongShapes(Misbehaving):
    """Returns tensors of other shapes."""

    name = "bad-shape"

    def misbehave(self, task: AggregationTask):
        """One number for each."""
        return {name: tensor.sum() for name, tensor in task.weights.items()}


class ForgetsToReturn(Misbehaving):
    """Computes, and gives nothing back."""

    name = "bad-forgets"

    def misbehave(self, task: AggregationTask):
        """The most frequent mistake of all."""
        average(task)


class ReturnsNoTensors(Misbehaving):
    """Returns something that is no mapping of tensors."""

    name = "bad-type"

    def misbehave(self, task: AggregationTask):
        """A list."""
        return list(task.weights.values())


class PrintsAndLeavesThreads(Misbehaving):
    """Prints control characters, and leaves a thread that outlives the run; nothing of it is an error."""

    name = "bad-chatters"

    def misbehave(self, task: AggregationTask):
        """Clears the screen of whoever looks on."""
        print("\x1b[2J\x1b[H all yours")
        threading.Thread(target=time.sleep, args=(3600,)).start()
        return average(task)

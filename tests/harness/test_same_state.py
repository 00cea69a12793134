"""Whatever a run does to its process, the next one starts from the same state, and nothing of it is left running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedbench.engine import Event, Policy, RunFailed, RunFinished, execute
from fedbench.engines import warm
from fedbench.engines.processes import Processes
from fedbench.expand import expand
from fedbench.failure_text import DETAILS, REASON
from fedbench.prepare import Settings
from fedbench.resolve import Overrides
from fedbench.spec import RunSpec
from fedbench.suite import parse_suite

SUITE = """
name: state
dataset: "embedded?train=240&test=40"
scenario: {preset: iid, clients: 4, participation: 0.5}
training: {rounds: 2}
seeds: [0]
rows: [{method: fedavg}]
"""
HEADER = '''
"""Each answers `aggregate` as FedAvg does, and changes something that all code of a process shares."""
import ctypes, gc, json, locale, logging, os, random, signal, subprocess, sys, threading, time, warnings
from dataclasses import dataclass

import numpy as np
import torch

import fedbench.defaults
from fedbench.defaults import average
from fedbench.hookspecs import hookimpl


@dataclass(frozen=True, kw_only=True)
class P:
    """None."""


class Hostile:
    citation, Params, recipe = "nobody", P, {}

    def __init__(self, params):
        pass

    @hookimpl
    def aggregate(self, task):
        answer = average(task)
        self.spoil(task)
        return answer


class InPlace(Hostile):
    name = "in-place"

    def spoil(self, task):
        pass

    @hookimpl
    def local_train(self, task):
        task.inputs.features.zero_()
        if task.labels is not None:
            task.labels.zero_()
        return fedbench.defaults.local_sgd(task)


class Dataset(Hostile):
    """Everything that was loaded, in place."""
    name = "all-tensors"

    def spoil(self, task):
        for tensor in [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]:
            if not tensor.requires_grad and tensor.dtype in (torch.float32, torch.uint8, torch.int64):
                tensor.zero_()
'''
NO_RETRY = Policy(retries=0)
SPOILING = {
    "patched": "import fedbench.defaults as d; d.average = d.weighted_mean = None; d.FedAvg.aggregate = None",
    "patched-harness": "import fedbench.metrics as m; m.summarise = lambda history: {'global_accuracy': 99.9}",
    "default-dtype": "torch.set_default_dtype(torch.float64)",
    "default-device": "torch.set_default_device('meta')",
    "no-grad": "torch.set_grad_enabled(False)",
    "matmul": "torch.set_float32_matmul_precision('medium'); torch.backends.mkldnn.flags(False).__enter__()",
    "deterministic": "torch.use_deterministic_algorithms(True); torch.set_flush_denormal(True)",
    "reseeded": "random.seed(1); np.random.seed(1); torch.manual_seed(1); np.seterr(all='raise')",
    "environment": "os.environ.clear(); os.environ['HOME'] = '/nowhere'; os.chdir('/'); os.umask(0o777)",
    "warnings": "warnings.simplefilter('error'); logging.disable(50); logging.getLogger().handlers.clear()",
    "imports": "sys.path.clear(); [sys.modules.pop(name) for name in list(sys.modules) if 'fedbench' in name]",
    "signals": "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT)]",
    "standard-streams": "os.close(1); os.close(2); sys.stdout = sys.stderr = None",
    "stopped-collecting": "gc.disable(); sys.setrecursionlimit(120); sys.setswitchinterval(5)",
    "cached": "import fedbench.datasets; fedbench.datasets.load_dataset = lambda *a, **k: 1 / 0; json.dumps = None",
    "leaves-early": "os._exit(0)",
}


def hostile_file(folder: Path) -> Path:
    classes = [
        f"class Spoils{number}(Hostile):\n    name = {name!r}\n\n    def spoil(self, task):\n        {code}\n"
        for number, (name, code) in enumerate(SPOILING.items())
    ]
    (folder / "hostile.py").write_text("\n\n".join([HEADER, *classes]))
    return folder / "hostile.py"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("state")
    return Settings(folder, folder / "cache", (hostile_file(folder),))


def specs_of(settings: Settings, *methods: str) -> list[RunSpec]:
    return expand(parse_suite(SUITE, "state"), Overrides(methods=methods, plugin_files=settings.plugin_files))


def outcome(event: RunFinished) -> tuple[Any, ...]:
    """All that a run gives, times aside."""
    result = event.result
    return (
        [(record.round, record.metrics, record.bytes_up, record.bytes_down) for record in result.records],
        {name: value for name, value in result.summary.items() if "seconds" not in name},
        result.predictions,
        {name: array.tobytes() for name, array in result.weights.items()},
    )


def of_fedavg(events: Iterable[Event]) -> list[Event]:
    return [e for e in events if e.spec.method == "fedavg" and isinstance(e, RunFinished | RunFailed)]


def test_whatever_a_run_does_to_its_process_the_next_gives_the_same_numbers_bit_for_bit(settings: Settings) -> None:
    fedavg, *hostile = specs_of(settings, "fedavg", "in-place", "all-tensors", *SPOILING)
    specs = [fedavg, *(spec for one in hostile for spec in (one, fedavg))]
    events = list(execute(specs, settings, 1, engine=Processes(settings, 1), policy=NO_RETRY))
    ends = of_fedavg(events)
    assert len(ends) == 1 + len(hostile) == 3 + len(SPOILING)
    assert [end.reason for end in ends if isinstance(end, RunFailed)] == []
    assert [outcome(end) == outcome(ends[0]) for end in ends if isinstance(end, RunFinished)] == [True] * len(ends)

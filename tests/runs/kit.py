"""What tests of runs share: a small suite, method files, listeners that stop a run, results without their times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedbench.core.method.hooks import hookimpl
from fedbench.core.records import RunResult
from fedbench.core.spec import RunSpec
from fedbench.runs.engines.events import Event, RunFinished
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import parse_suite

SUITE = """
name: NAME
dataset: "embedded?train=240&test=40"
scenario: {preset: iid, clients: 4, participation: 0.5}
training: {rounds: 2}
seeds: [0, 1]
rows: [{method: fedavg}, {method: fedclip}]
"""
METHOD = '''
"""A method of a test, which answers `aggregate`."""
import ctypes, gc, json, locale, logging, os, random, signal, subprocess, sys, threading, time, types, warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import fedbench.toolkit.fedavg
from fedbench.core.method.hooks import hookimpl
from fedbench.toolkit.fedavg import average
from fedbench.toolkit.local_training import local_sgd


@dataclass(frozen=True, kw_only=True)
class P:
    """None."""


class {cls}:
    name, citation, Params, recipe = "{name}", "nobody", P, {{}}

    def __init__(self, params):
        pass

    @hookimpl
    def aggregate(self, task):
        """The mean, and what the test is about."""
{body}
'''


def method_file(folder: Path, name: str, body: str) -> Path:
    """The file of a method whose `aggregate` has these lines."""
    lines = "\n".join(f"        {line}" for line in body.strip("\n").splitlines())
    (folder / f"{name}.py").write_text(METHOD.format(cls=name.title().replace("-", ""), name=name, body=lines))
    return folder / f"{name}.py"


def specs_of(suite: str = SUITE, plugins: Iterable[Path] = (), **given: Any) -> list[RunSpec]:
    """The runs of the suite, with the plugin files and whatever else the command line gives."""
    return expand(parse_suite(suite, "tests"), Overrides(plugin_files=tuple(plugins), **given))


class Stop(Exception):
    """What ends a run from outside."""


class Listener:
    """Ends the run once ``stop_after`` is done, as Ctrl-C or a full store would, and keeps what it hears."""

    def __init__(self, stop_after: int = -1) -> None:
        self.stop_after = stop_after
        self.rounds: list[int] = []
        self.warnings: list[str] = []
        self.resumed: int | None = None

    @hookimpl
    def run_started(self, info) -> None:
        self.resumed = info.resumed_round

    @hookimpl
    def round_finished(self, record) -> None:
        self.rounds.append(record.round)
        if record.round == self.stop_after:
            raise Stop

    @hookimpl
    def run_warned(self, warning) -> None:
        self.warnings.append(warning)


def everything(result: RunResult) -> dict[str, object]:
    """All of a result that must not depend on breaks, engines and other runs: tensors as bytes, no times."""
    held: dict[str, Any] = {"weights": result.weights, "buffers": result.buffers}
    held |= {f"own {client}": own for client, own in result.own.items()}
    held |= {f"{client} {name}": kept for client, of in result.clients.items() for name, kept in of.items()}
    return {
        "tensors": {where: {name: a.tobytes() for name, a in arrays.items()} for where, arrays in held.items()},
        "summary": {name: value for name, value in result.summary.items() if "seconds" not in name},
        "predictions": result.predictions,
        "records": [replace(record, seconds=0.0) for record in result.records],
    }


def outcomes(events: Iterable[Event]) -> dict[str, dict[str, object]]:
    """`everything` of the runs that finished, by run id."""
    return {event.spec.run_id: everything(event.result) for event in events if isinstance(event, RunFinished)}

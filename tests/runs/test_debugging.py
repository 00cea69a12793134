"""``breakpoint()`` in a method: a hint where no terminal is, a debugger where one is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedbench.cli.app import app

METHOD = '''
"""A method under a debugger."""
from fedbench.api import AggregationTask, Method, NoParams, hookimpl
from fedbench.toolkit.fedavg import average


class Debugged(Method[NoParams]):
    """Stops at the server."""

    name = "debugged"
    citation = "Nobody, A method that stops, 2000"

    @hookimpl
    def aggregate(self, task: AggregationTask):
        """The mean."""
        breakpoint()
        return average(task)
'''


def run(folder: Path, *further: str) -> tuple[int, str]:
    """How `fedbench run` of the method ends, and what it says."""
    (folder / "debugged.py").write_text(METHOD)
    sets = ("--set", "rounds=1", "clients=4", "dataset=embedded?train=200&test=40")
    words = ("run", "--method", "debugged", "--plugin", str(folder / "debugged.py"), "--scenario", "iid")
    places = ("--store", str(folder / "store"), "--cache-dir", str(folder / "cache"))
    done = CliRunner().invoke(app, [*words, *sets, *places, *further])
    return done.exit_code, " ".join(done.output.split())


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled by a debugger of the caller's own, in its process and in those it forks."""
    seen: list[str] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda *_, **__: seen.append("here"))
    return seen


def test_in_a_process_of_its_own_it_says_how_to_debug(tmp_path: Path, reached: list[str]) -> None:
    code, said = run(tmp_path)
    assert code == 1 and "run with --engine in-process, and with --executor sequential" in said, said
    assert not reached


def test_in_this_process_the_debugger_is_reached(tmp_path: Path, reached: list[str]) -> None:
    code, said = run(tmp_path, "--engine", "in-process", "--executor", "sequential")
    assert code == 0 and reached == ["here"], said

"""``breakpoint()`` in a method: a hint where no terminal is, a debugger where one is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
HOOK = """
def note(*_, **__):
    print("the debugger was reached")
"""


def run(folder: Path, *further: str) -> subprocess.CompletedProcess[str]:
    (folder / "debugged.py").write_text(METHOD)
    (folder / "my_debugger.py").write_text(HOOK)
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONBREAKPOINT": "my_debugger.note"}
    sets = ("--set", "rounds=1", "clients=4", "dataset=embedded?train=200&test=40")
    words = ("run", "--method", "debugged", "--plugin", str(folder / "debugged.py"), "--scenario", "iid", "--plain")
    places = ("--store", str(folder / "store"), "--cache-dir", str(folder / "cache"))
    command = [sys.executable, "-m", "fedbench", *words, *sets, *places, *further]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=300)


def test_in_a_process_of_its_own_it_says_how_to_debug(tmp_path: Path) -> None:
    done = run(tmp_path)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 1 and "run with --engine in-process, and with --executor sequential" in said, said
    assert "the debugger was reached" not in said


def test_in_this_process_the_debugger_is_reached(tmp_path: Path) -> None:
    done = run(tmp_path, "--engine", "in-process", "--executor", "sequential")
    assert done.returncode == 0 and "the debugger was reached" in done.stdout, done.stdout + done.stderr

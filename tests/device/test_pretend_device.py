"""Every method on a device that pretends to be none of the CPU, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("on_the_device.py")


@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_methods_run_there_and_planted_faults_are_found(marked: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-m",
        marked,
        str(CHECKS),
    ]
    done = subprocess.run(command, cwd=CHECKS.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

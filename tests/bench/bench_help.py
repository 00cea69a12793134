"""Seconds of `fedbench --help` in a fresh process; the goal is 0.5. Run: python tests/bench/bench_help.py"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

REPEATS = 10
COMMAND = [
    sys.executable,
    "-c",
    "import sys; sys.argv = ['fedbench', '--help']; from fedbench.cli.app import main; main()",
]


def seconds() -> float:
    """One call."""
    started = time.perf_counter()
    subprocess.run(COMMAND, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


if __name__ == "__main__":
    seconds()
    taken = [seconds() for _ in range(REPEATS)]
    print(f"fedbench --help: median {statistics.median(taken):.3f} s, slowest {max(taken):.3f} s of {REPEATS}")

"""Seconds from the start of `fedbench run` to the end of round 1: FedAvg's head of the suite longtail, caches filled.

Run: python tests/bench/bench_start.py [PYTHON ...]; several interpreters (of several versions) are interleaved, and
compared with the first.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPEATS = 7
CODE = "import sys; sys.argv[0] = 'fedbench'; from fedbench.cli.app import command; command()"
SUITE = ("run", "--suite", "longtail", "--method", "fedavg", "--seed", "0")
ROW = (*SUITE, "--set", "backbone=clip:embedded", "lr=0.01", "rounds=1")


def seconds(python: str, cache: Path, store: Path) -> float:
    """Until the line that says that the run, of one round, is done."""
    started = time.perf_counter()
    command = [python, "-c", CODE, *ROW, "--cache-dir", str(cache), "--store", str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        told = []
        for line in process.stdout:
            told.append(line)
            if line.startswith("done"):
                taken = time.perf_counter() - started
                process.communicate()
                return taken
    raise SystemExit(f"no run was carried out:\n{''.join(told)}")


def main(pythons: list[str]) -> None:
    """Interleaved: A B A B ...; the first call of each fills its caches and does not count."""
    with tempfile.TemporaryDirectory() as folder:
        taken: dict[int, list[float]] = {}
        for repeat in range(REPEATS + 1):
            for number, python in enumerate(pythons):
                place = Path(folder) / str(number)
                one = seconds(python, place, place / f"store-{repeat}")
                if repeat:
                    taken.setdefault(number, []).append(one)
    for number, python in enumerate(pythons):
        ratio = statistics.median(one / first for one, first in zip(taken[number], taken[0], strict=True))
        median, most = statistics.median(taken[number]), max(taken[number])
        print(f"{python}: median {median:.2f} s, slowest {most:.2f} s of {REPEATS}; {ratio:.2f} of the first")


if __name__ == "__main__":
    main(sys.argv[1:] or [sys.executable])

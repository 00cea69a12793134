"""W1 to W3 and W6 of ``tests.bench`` on the device: seconds of a round, peak memory, ratios to the first row."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from fedbench.models.inputs import FeatureInputs
from fedbench.rounds.executors import ExecutorName
from fedbench.rounds.executors.cohort import Cohort
from fedbench.rounds.executors.sequential import Sequential
from fedbench.rounds.loop import evaluate, start, train_round
from fedbench.rounds.run import Run
from fedbench.runs.prepare import prepare
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import load_suite
from tests.bench.cells import SUITE
from tests.bench.systems.fedbench_runs import run_of, settings
from tests.bench.workloads import CNN, HEAD, Job, make_data
from tests.gpu.table import Line

ROUNDS, TINY_ROUNDS = 8, 3
RUNS, TINY_RUNS = 40, 2
"""Of W6, which has 200 on a CPU."""
BOTH: tuple[ExecutorName, ...] = ("sequential", "auto")
Way = tuple[str, Callable[[], Run]]


def measure(device: str, *, is_tiny: bool) -> Iterator[Line]:
    """Every row; the first of a workload is what the others' ratios are to."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rounds = TINY_ROUNDS if is_tiny else ROUNDS
        for title, ways in _trained(device, folder, rounds, is_tiny=is_tiny):
            first: float | None = None
            for how, make in ways:
                line = timed(title, how, make, device, first)
                first = first or line.seconds
                yield line
        first = None
        for executor in BOTH:
            line = short_runs(executor, device, folder, TINY_RUNS if is_tiny else RUNS, first)
            first = first or line.seconds
            yield line


def _trained(device: str, folder: Path, rounds: int, *, is_tiny: bool) -> Iterator[tuple[str, list[Way]]]:
    def bench(job: Job, executor: ExecutorName = "auto", **training: object) -> Run:
        run = run_of(job, make_data(job, folder / "data"), settings(folder / "w", executor, 1), device, **training)
        return run

    cnn, head = (_shrunk(job, rounds) if is_tiny else replace(job, rounds=rounds) for job in (CNN, HEAD))
    yield (
        "W1 CNN on images, 10 clients",
        [
            ("one after another", lambda: bench(cnn)),
            ("one after another, bfloat16", lambda: bench(cnn, precision="bfloat16")),
            ("one after another, augmented there", lambda: bench(cnn, augment="sample")),
            ("stacked (vmap over clients)", lambda: stacked(bench(cnn))),
        ],
    )
    yield "W2 linear head, 10 clients", [(executor, lambda e=executor: bench(head, e)) for executor in BOTH]  # type: ignore[misc]
    budget = (("rounds", rounds), ("device", device))

    def promptfl(executor: ExecutorName) -> Run:
        spec, *_ = expand(load_suite("longtail"), Overrides(methods=("promptfl",), sets=budget))
        return prepare(spec, settings(folder / "w", executor, 1))

    yield "W3 PromptFL, 8 clients", [(executor, lambda e=executor: promptfl(e)) for executor in BOTH]  # type: ignore[misc]


def _shrunk(job: Job, rounds: int) -> Job:
    return replace(job, clients=4, samples=20, cohort=2, batch=10, rounds=rounds, train=80, test=40)


def stacked(run: Run) -> Run:
    """``run`` on images that are transformed once and for all, with its cohorts' clients stacked like those of a head.

    What the product does not do on its own, tried out: convolutions of many clients become grouped ones.
    """
    table = FeatureInputs(run.train.read(torch.arange(len(run.train))), is_image=True)
    return replace(run, train=table, executor=Cohort(run.assembly, Sequential(), strict=True))


def timed(what: str, how: str, make: Callable[[], Run], device: str, first: float | None) -> Line:
    """The median round but the first, and what the trained model finds."""
    is_cuda = device.startswith("cuda")
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        run = make()
        state = run.initial_state()
        start(run, state)
        seconds = []
        for _ in range(run.spec.training.rounds):
            began = time.perf_counter()
            state, record = train_round(run, state)
            if is_cuda:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
        accuracy = evaluate(run, state)[0]["global_accuracy"]
    except Exception as error:
        told = f"fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return Line(what, how, float("nan"), found=told, has_failed=True)
    median = statistics.median(seconds[1:])
    peak = torch.cuda.max_memory_allocated(device) if is_cuda else None
    ratio = 1.0 if first is None else median / first
    return Line(what, how, median, ratio, peak, f"{accuracy:.1f} % after {len(seconds)} rounds; {record.executor}")


def short_runs(executor: ExecutorName, device: str, folder: Path, runs: int, first: float | None) -> Line:
    """A whole command with that many runs of FedAvg's head, two at a time."""
    seeds = [word for seed in range(runs) for word in ("--seed", str(seed))]
    row = ("--method", "fedavg", "--set", "backbone=clip:embedded", "lr=0.01", f"device={device}")
    places = ("--cache-dir", str(folder / "w" / "cache"), "--store", str(folder / executor), "--executor", executor)
    command = [sys.executable, "-c", SUITE, "run", "--suite", "longtail", *row, *seeds, *places, "--jobs", "2"]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    seconds = time.perf_counter() - began
    what = f"W6 {runs} short runs"
    if done.returncode:
        return Line(what, executor, seconds, found=f"fails: {done.stderr.strip()[-200:]}", has_failed=True)
    return Line(what, executor, seconds, 1.0 if first is None else seconds / first, found="the whole command")

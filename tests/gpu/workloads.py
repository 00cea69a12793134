"""W1 to W3 and W6 of ``tests.bench``, and prompts of a ViT-B/16, on the device: seconds of a round, peak memory, ratios
to the first row."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import open_clip
import torch
from safetensors.torch import save_file

from fedbench.rounds.executors import ExecutorName
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
CNN_ROUNDS = 30
"""After 8 its accuracy still rises by points a round."""
ARCH = "ViT-B-16"
RUNS, TINY_RUNS = 8, 2
"""Of W6, which has 200 on a CPU: every process sets up the device first."""
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

    cnn = _shrunk(CNN, rounds) if is_tiny else replace(CNN, rounds=CNN_ROUNDS)
    head = _shrunk(HEAD, rounds) if is_tiny else replace(HEAD, rounds=rounds)
    yield (
        "W1 CNN on images, 10 clients",
        [
            ("one after another", lambda: bench(cnn, "sequential")),
            ("one after another, without TF32", lambda: bench(cnn, "sequential")),
            ("one after another, bfloat16", lambda: bench(cnn, "sequential", precision="bfloat16")),
            ("one after another, augmented there", lambda: bench(cnn, "sequential", augment="sample")),
            ("at once", lambda: bench(cnn, "cohort")),
            ("at once, without TF32", lambda: bench(cnn, "cohort")),
            ("at once, bfloat16", lambda: bench(cnn, "cohort", precision="bfloat16")),
            ("at once, augmented there", lambda: bench(cnn, "cohort", augment="sample")),
        ],
    )
    yield "W2 linear head, 10 clients", [(executor, lambda e=executor: bench(head, e)) for executor in BOTH]  # type: ignore[misc]
    budget = (("rounds", rounds), ("device", device))

    def promptfl(executor: ExecutorName) -> Run:
        spec, *_ = expand(load_suite("longtail"), Overrides(methods=("promptfl",), sets=budget))
        return prepare(spec, settings(folder / "w", executor, 1))

    yield "W3 PromptFL, 8 clients", [(executor, lambda e=executor: promptfl(e)) for executor in BOTH]  # type: ignore[misc]
    tower = "clip:embedded" if is_tiny else random_weights(folder)

    def prompts(method: str, options: tuple[tuple[str, object], ...], precision: str) -> Run:
        sets = (*budget, *options, ("backbone", tower), ("precision", precision), ("local_epochs", 1))
        spec, *_ = expand(load_suite("capt"), Overrides(methods=(method,), sets=sets))
        return prepare(spec, settings(folder / "w", "auto", 1))

    # PromptFL encodes images once, CAPT's tokens pass through the image tower
    for method, options in (("promptfl", ()), ("capt-reconstructed", (("capt-reconstructed.vl_align", True),))):
        ways = [(precision, partial(prompts, method, options, precision)) for precision in ("float32", "bfloat16")]
        yield f"{method}, {'tiny' if is_tiny else ARCH}, 8 clients", ways


def random_weights(folder: Path) -> str:
    """The name of a dual encoder of ``ARCH``'s size whose weights are drawn: a round costs what it does with CLIP's."""
    file = folder / "weights.safetensors"
    torch.manual_seed(0)
    save_file(open_clip.create_model(ARCH).state_dict(), file)
    return f"clip:{ARCH}@{file}"


def _shrunk(job: Job, rounds: int) -> Job:
    return replace(job, clients=4, samples=20, cohort=2, batch=10, rounds=rounds, train=80, test=40)


def timed(what: str, how: str, make: Callable[[], Run], device: str, first: float | None) -> Line:
    """The median round but the first, and what the trained model finds."""
    is_cuda = device.startswith("cuda")
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    # what torch has by default: convolutions may have 10 bits of mantissa
    torch.backends.cudnn.allow_tf32 = "without TF32" not in how
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
        return Line(what, executor, seconds, found=f"fails: {' '.join(done.stderr.split())[-400:]}", has_failed=True)
    return Line(what, executor, seconds, 1.0 if first is None else seconds / first, found="the whole command")

"""The workloads of the stages: W1 to W3 and W9 to W11 in this process, W6 and the suite longtail as whole commands."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import open_clip
import torch
from safetensors.torch import save_file
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from fedbench.core.types import Backbone
from fedbench.datasets.classnames import CIFAR100
from fedbench.models import load_backbone
from fedbench.rounds.executors import ExecutorName
from fedbench.rounds.executors import graphs as recording
from fedbench.rounds.loop import evaluate, start, train_round
from fedbench.rounds.run import Run
from fedbench.runs.prepare import prepare
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import load_suite
from tests.bench.cells import SUITE, cores
from tests.bench.systems.fedbench_runs import dataset, run_of, settings
from tests.bench.workloads import CNN, HEAD, PFL, Job, make_data
from tests.gpu.arithmetic import NO_TF32, SIDE, TINY_SIDE, ceiling, flops_of_an_image, synchronised, work_of
from tests.gpu.table import Aim, Line, Place, Row

ROUNDS, TINY_ROUNDS = 8, 2
CNN_ROUNDS = 30
"""After 8 its accuracy still rises by points a round."""
TOWER_ROUNDS = 6
ARCH = "ViT-B-16"
RUNS, TINY_RUNS = 16, 2
"""Of W6, which has 200 on a CPU: every process sets up the device first."""
LONGEST = 90
"""Seconds after which a whole command is ended."""
SHOWN = 15
"""Kernels and operations of a profile."""
IMAGES = Job(network="cnn", classes=100, clients=20, samples=160, cohort=8, batch=32, rounds=8, train=3200, test=500)
"""Of W10: as many steps in a round as CAPT's long tail has."""


@dataclass(frozen=True)
class Way:
    """How a workload is trained."""

    how: str
    executor: ExecutorName
    precision: str = "float32"
    has_graphs: bool = True
    device: str = ""
    """The stage's own where empty."""
    training: dict[str, Any] = field(default_factory=dict)
    aim: Aim | None = None


Make = Callable[[Way], Run]
EAGER = Way("one after another, no graphs", "sequential", has_graphs=False)
GRAPHS = Way("one after another, graphs", "sequential")
AT_ONCE = Way("at once", "cohort")
AUTO = Way("at once where it can", "auto")
ON_CPU = Way(f"on the CPU, {cores()} cores", "auto", device="cpu")


def graphs(place: Place) -> Iterator[Row]:
    """W1: what a step of a small network costs."""
    job = _shrunk(CNN, TINY_ROUNDS) if place.is_tiny else replace(CNN, rounds=CNN_ROUNDS)
    ways = [
        EAGER,
        replace(GRAPHS, aim=Aim("step", 0.7)),
        replace(AT_ONCE, how="at once, no graphs", has_graphs=False),
        replace(AT_ONCE, aim=Aim("step", 0.35)),
        replace(GRAPHS, precision="tf32", aim=Aim("step", 0.7)),
        replace(AT_ONCE, precision="tf32", aim=Aim("step", 0.35)),
        replace(GRAPHS, precision="bfloat16"),
        replace(AT_ONCE, precision="bfloat16"),
        replace(AT_ONCE, how="at once, augmented there", training={"augment": "sample"}),
        ON_CPU,
    ]
    yield from trained("W1 CNN on images, 10 clients", partial(_bench, place, job), ways, place)


def w11(place: Place) -> Iterator[Row]:
    """CAPT with tokens in the image tower of a ViT-B/16, as released and as reconstructed."""
    half, short = Aim("images", 1200), Aim("images", 500)
    ways = [
        replace(GRAPHS, precision="bfloat16", aim=half),
        replace(GRAPHS, precision="tf32", aim=short),
        replace(EAGER, precision="bfloat16", aim=half),
        GRAPHS,
    ]
    yield from trained(f"W11 capt, {_tower_named(place)}, 8 clients", partial(_capt, place), ways, place, most=5)
    ways = [
        replace(AUTO, precision="bfloat16", aim=half),
        replace(AUTO, precision="tf32", aim=short),
        replace(GRAPHS, precision="bfloat16", aim=half),
        AUTO,
    ]
    what = f"W11 capt-reconstructed, {_tower_named(place)}, 8 clients"
    make = partial(_capt, place, method="capt-reconstructed")
    yield from trained(what, make, ways, place, most=5)


def w10(place: Place) -> Iterator[Row]:
    """PromptFL on a ViT-B/16: 100 classes dealt iid, and the 10 of CAPT's long tail that were measured first."""
    aim = Aim("seconds", 0.12)
    ways = [
        replace(AUTO, precision="tf32", aim=aim),
        replace(AUTO, precision="bfloat16"),
        AUTO,
        replace(GRAPHS, precision="tf32", aim=aim),
        replace(EAGER, precision="tf32", aim=aim),
    ]
    for classes, make in ((100, partial(_promptfl_of_100, place)), (10, partial(_capt, place, method="promptfl"))):
        yield from trained(f"W10 promptfl, {_tower_named(place)}, {classes} classes, 8 clients", make, ways, place)


def w9(place: Place) -> Iterator[Row]:
    """FedAvg of pfl's CIFAR-10 workload."""
    job = _shrunk(PFL, TINY_ROUNDS) if place.is_tiny else PFL
    ways = [
        AT_ONCE,
        replace(AT_ONCE, precision="tf32"),
        replace(GRAPHS, precision="tf32"),
        replace(AT_ONCE, precision="bfloat16"),
        replace(EAGER, precision="tf32"),
    ]
    what = f"W9 CNN on images, {job.cohort} of {job.clients:,} clients"
    yield from trained(what, partial(_bench, place, job), ways, place, most=6)


def w2_w3(place: Place) -> Iterator[Row]:
    """A linear head and PromptFL on cached features of the embedded CLIP."""
    rounds = TINY_ROUNDS if place.is_tiny else ROUNDS
    job = _shrunk(HEAD, rounds) if place.is_tiny else replace(HEAD, rounds=rounds)
    ways = [EAGER, GRAPHS, AUTO, replace(AUTO, precision="tf32"), ON_CPU]
    yield from trained("W2 linear head, 10 clients", partial(_bench, place, job), ways, place)
    make = partial(_prepared, place, "longtail", "promptfl", (("rounds", rounds),))
    yield from trained("W3 PromptFL, 8 clients", make, ways, place)


def w6(place: Place) -> Iterator[Row]:
    """Many short runs in one command: FedAvg's head of the suite longtail, after one run that fills the caches."""
    runs = TINY_RUNS if place.is_tiny else RUNS
    seeds = [word for seed in range(runs) for word in ("--seed", str(seed))]
    sets = ("--set", "backbone=clip:embedded", "lr=0.01", *(["rounds=2"] if place.is_tiny else []))

    def command(device: str, jobs: int, *seeds: str) -> Line:
        row = ("--method", "fedavg", *sets, f"device={device}", *seeds, "--jobs", str(jobs))
        return whole_command(place, "w6", row)

    yield Row("W6 one run", "empty caches", partial(command, place.device, 1, "--seed", str(runs)))
    aim = Aim("seconds", 15)
    for device, jobs in (place.device, 8), (place.device, 4), ("cpu", 8):
        what, how = f"W6 {runs} short runs", f"{device}, {jobs} processes"
        yield Row(what, how, partial(command, device, jobs, *seeds), None if device == "cpu" else aim)


def longtail(place: Place) -> Iterator[Row]:
    """The whole suite, with empty caches and then with other seeds."""
    rows = ("--method", "fedprox", "--set", "rounds=1") if place.is_tiny else ("--set",)
    other, aim = ("--seed", "2", "--seed", "3"), Aim("seconds", 40)
    for how, device, seeds in (
        ("empty caches", place.device, ()),
        ("filled caches, other seeds", place.device, other),
        ("filled caches, other seeds", "cpu", other),
    ):
        command = partial(whole_command, place, "longtail", (*rows, f"device={device}", *seeds))
        yield Row("suite longtail", f"{how}, {device}", command, None if device == "cpu" else aim)


def profiles(place: Place) -> Iterator[Row]:
    """What a round of W11 and of W1 is spent on."""
    job = _shrunk(CNN, TINY_ROUNDS) if place.is_tiny else CNN
    few = {"local_steps": 2}
    capt, cnn = partial(_capt, place), partial(_bench, place, job)
    for what, make, way in (
        ("W11 capt", capt, replace(EAGER, precision="bfloat16", training=few)),
        ("W1 CNN", cnn, replace(EAGER, training=few)),
        ("W1 CNN", cnn, replace(AT_ONCE, training=few)),
        ("W11 capt", capt, replace(GRAPHS, precision="bfloat16", training=few)),
    ):
        yield Row(what, f"{way.how}, {way.precision}", partial(profiled, make, way, place))


def trained(what: str, make: Make, ways: list[Way], place: Place, most: float = 10) -> Iterator[Row]:
    """The rows of a workload, whose operations are counted first; rounds end after ``most`` seconds."""
    flops: list[float] = []

    def counted() -> Line:
        began = time.perf_counter()
        flops.append(flops_of_an_image(make(EAGER)))
        found = f"{flops[0] / 1e9:.3g} GFLOP an image, of products, convolutions and attention"
        return Line(seconds=time.perf_counter() - began, found=found)

    yield Row(f"{what}: operations", "counted", counted)
    for way in ways:
        yield Row(what, f"{way.how}, {way.precision}", partial(timed, make, way, place, flops, most), way.aim)


def timed(make: Make, way: Way, place: Place, flops: list[float], most: float) -> Line:
    """Every round but the first, till all are done, ``most`` seconds have passed or the stage's time is over."""
    device = way.device or place.device
    if way.precision == "tf32" and device == "cpu":
        return Line(found=NO_TF32)
    is_cuda = device.startswith("cuda")
    if is_cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    run = make(way)
    recording.IS_ON = way.has_graphs
    state = run.initial_state()
    start(run, state)
    rounds, seconds, images, steps = run.spec.training.rounds, [], 0, 0
    for number in range(rounds):
        began = time.perf_counter()
        state, record = train_round(run, state)
        synchronised(device)
        if number:
            seconds.append(time.perf_counter() - began)
            more = work_of(run, record)
            images, steps = images + more[0], steps + more[1]
        if number and (sum(seconds) > most or place.left < 0):
            break
    peak = torch.cuda.max_memory_allocated(device) if is_cuda else None
    median, total = statistics.median(seconds), sum(seconds)
    found = [f"loss {record.metrics['train_loss']:.3f} after {state.round} rounds", record.executor]
    if run.model.encoder is not None or run.spec.method == "fedavg":  # a whole tower takes seconds to evaluate
        found.insert(0, f"{evaluate(run, state)[0]['global_accuracy']:.1f} %")
    if state.round < rounds:
        found.append(f"{rounds:,} rounds would take {rounds * median / 60:.1f} minutes")
    tflops = images / total * flops[0] / 1e12 if flops else None
    share = None
    if tflops is not None and device == place.device:
        share = 100 * tflops / ceiling(way.precision, device, TINY_SIDE if place.is_tiny else SIDE)
    return Line(
        seconds=median,
        step=1000 * total / steps,
        images=images / total,
        tflops=tflops,
        share=share,
        peak=peak,
        found="; ".join(found),
    )


def profiled(make: Make, way: Way, place: Place) -> Line:
    """The second round under torch's profiler: the kernels and the operations with the most time of their own."""
    run = make(way)
    recording.IS_ON = way.has_graphs
    state = run.initial_state()
    start(run, state)
    state, _ = train_round(run, state)
    synchronised(place.device)
    is_cuda = place.device.startswith("cuda")
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]) as told:
        began = time.perf_counter()
        state, record = train_round(run, state)
        synchronised(place.device)
        seconds = time.perf_counter() - began
    events = told.key_averages()
    on_device = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    kernels = [(event.self_device_time_total, event.count, event.key) for event in on_device]
    on_cpu = [event for event in events if event.device_type == DeviceType.CPU]
    operations = [(event.self_cpu_time_total, event.count, event.key) for event in on_cpu]
    tables = [_most(kind, rows) for kind, rows in (("kernel", kernels), ("CPU operation", operations)) if rows]
    found = f"{work_of(run, record)[1]} steps"
    if is_cuda:
        busy = sum(micro for micro, *_ in kernels) / 1e6
        found += f"; {sum(calls for _, calls, _ in kernels)} kernels, which take {busy:.3g} s"
    return Line(seconds=seconds, found=found, below="\n\n".join(tables))


def _most(kind: str, rows: list[tuple[float, int, str]]) -> str:
    head = [f"| {kind} | calls | ms | % |", "|---|---:|---:|---:|"]
    total = sum(micro for micro, *_ in rows) or 1
    body = [
        f"| {key[:90].replace('|', '/')} | {calls} | {micro / 1000:.2f} | {100 * micro / total:.1f} |"
        for micro, calls, key in sorted(rows, reverse=True)[:SHOWN]
    ]
    return "\n".join([*head, *body])


def whole_command(place: Place, name: str, arguments: tuple[str, ...]) -> Line:
    """``fedbench run`` of the suite longtail with a new store, and the caches of all commands called ``name``."""
    store = place.folder / f"{name}-store-{time.monotonic_ns()}"
    places = ("--cache-dir", str(place.folder / name), "--store", str(store))
    command = [sys.executable, "-c", SUITE, "run", "--suite", "longtail", *arguments, *places]
    most = max(min(LONGEST, place.left), 1)
    began = time.perf_counter()
    # ended with all its workers, which are in the same group
    done = subprocess.run(
        ["timeout", "--signal=KILL", str(most), *command],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seconds = time.perf_counter() - began
    if seconds > most:
        return Line(found=f"not done after {most:.0f} s")
    if done.returncode:
        return Line(seconds=seconds, found=f"fails: {' '.join(done.stderr.split())[-400:]}", has_failed=True)
    return Line(seconds=seconds, found="the whole command")


def _bench(place: Place, job: Job, way: Way) -> Run:
    where = settings(place.folder / "w", way.executor, cores() if way is ON_CPU else 1)
    further = {"precision": way.precision, **way.training}
    return run_of(job, make_data(job, place.folder / "data"), where, way.device or place.device, **further)


def _capt(place: Place, way: Way, method: str = "capt") -> Run:
    """A row of the suite capt on the place's tower, with tokens among the patches where the method has them."""
    sets = _tower_sets(place) + (() if method == "promptfl" else ((f"{method}.vl_align", True),))
    return _prepared(place, "capt", method, sets, way, backbone=_tower(place.folder, place.is_tiny))


def _promptfl_of_100(place: Place, way: Way) -> Run:
    job = _shrunk(IMAGES, TINY_ROUNDS) if place.is_tiny else IMAGES
    names = tuple(name.replace("_", " ") for name in CIFAR100)
    data = replace(dataset(job, make_data(job, place.folder / "data")), classnames=names)
    dealt = (("partition", "iid"), ("imbalance", "none"), ("participation", job.cohort / job.clients))
    sets = (*_tower_sets(place), *dealt, ("clients", job.clients))
    tower = _tower(place.folder, place.is_tiny)
    return _prepared(place, "capt", "promptfl", sets, way, backbone=tower, dataset=data)


def _prepared(place: Place, suite: str, method: str, sets: tuple[tuple[str, Any], ...], way: Way, **loaded: Any) -> Run:
    """The first run of a suite's row, with further settings, on data and backbone that are loaded already."""
    where = settings(place.folder / "w", way.executor, cores() if way is ON_CPU else 1)
    of_way = {"device": way.device or place.device, "precision": way.precision, **way.training}
    spec, *_ = expand(load_suite(suite), Overrides(methods=(method,), sets=(*sets, *of_way.items())))
    return prepare(spec, where, **loaded)


def _tower_sets(place: Place) -> tuple[tuple[str, Any], ...]:
    rounds = TINY_ROUNDS if place.is_tiny else TOWER_ROUNDS
    return ("rounds", rounds), ("local_epochs", 1), ("backbone", _tower(place.folder, place.is_tiny).name)


def _tower_named(place: Place) -> str:
    return "tiny" if place.is_tiny else ARCH


@lru_cache
def _tower(folder: Path, is_tiny: bool) -> Backbone:
    """A dual encoder of ``ARCH``'s size, loaded once. Its weights are drawn: a round costs what it does with CLIP's."""
    if is_tiny:
        return load_backbone("clip:embedded", data_dir=folder, seed=0)
    file = folder / "weights.safetensors"
    torch.manual_seed(0)
    save_file(open_clip.create_model(ARCH).state_dict(), file)
    return load_backbone(f"clip:{ARCH}@{file}", data_dir=folder, seed=0)


def _shrunk(job: Job, rounds: int) -> Job:
    return replace(job, clients=5, samples=20, cohort=4, batch=10, rounds=rounds, train=100, test=40)

"""What is run: every workload's rows, each a command whose cost is measured, and whether it can be run here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.workloads import CNN, HEAD, TINY_HEAD, Job, keeping_clients, many_clients

ROOT = Path(__file__).resolve().parents[2]
PEERS = {"pfl": "pfl", "flower": "flwr", "fluke": "fluke-fl"}
"""Systems that are not ours, with the distribution to install."""
SYSTEMS = ("plain", "fedbench", *PEERS)
MODULES = {
    "plain": "plain",
    "fedbench": "fedbench_runs",
    "pfl": "pfl_runs",
    "flower": "flower_runs",
    "fluke": "fluke_runs",
}
RAY_LONGEST = 32
"""Characters of a folder below which Ray can make its own with sockets in it."""
SUITE = "import sys; sys.argv[0] = 'fedbench'; from fedbench.cli.app import command; command()"


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Cell:
    """One row of a workload's table.

    ``{scratch}`` in the arguments is a folder that the cells of a repeat share, ``{common}`` one for all repeats.
    """

    row: str
    system: str
    arguments: tuple[str, ...] = ()
    job: Job | None = None
    is_suite: bool = False
    """A whole command, timed from outside."""
    module: str = ""
    """That runs it, where it is not the system's own of `MODULES`."""


@dataclass(frozen=True)
class Workload:
    """Rows that are compared with the first of them."""

    name: str
    title: str
    cells: tuple[Cell, ...]
    hidden: bool = field(default=False)
    """For the tests of the benchmark itself."""


def _training(job: Job, *, also_one_core: bool) -> tuple[Cell, ...]:
    """The plain loop first: what ratios are taken to."""
    ours = [("fedbench", str(cores())), *([("fedbench, 1 core", "1")] if also_one_core and cores() > 1 else [])]
    return (
        Cell("plain", "plain", job=job),
        *([Cell("plain, default layout", "plain", ("--default-layout",), job)] if job.network == "cnn" else []),
        *(Cell(row, "fedbench", ("--cache", f"{{scratch}}/{number}", "--cores", number), job) for row, number in ours),
        *(Cell(peer, peer, job=job) for peer in PEERS),
    )


def _executor(name: str, partition: str) -> Cell:
    options = ("--cache", "{common}", "--executor", name, "--partition", partition)
    return Cell(f"{name}, {partition}", "fedbench", options)


def _suite(row: str, store: str, *seeds: str) -> Cell:
    folders = ("--cache-dir", "{scratch}/cache", "--store", "{scratch}/" + store)
    return Cell(row, "fedbench", ("run", "--suite", "longtail", *folders, *seeds), is_suite=True)


def _short_runs(method: str, runs: int) -> Cell:
    """Runs of a suite's row on CLIP that differ in their seed alone, with filled caches."""
    seeds = [word for seed in range(runs) for word in ("--seed", str(seed))]
    row = ("--method", method, "--set", "backbone=clip:embedded", "lr=0.01")
    folders = ("--cache-dir", "{common}", "--store", f"{{scratch}}/{method}")
    return Cell(f"{runs} runs", "fedbench", ("run", "--suite", "longtail", *row, *seeds, *folders), is_suite=True)


def _clients(number: int) -> Cell:
    arguments = ("--cache", f"{{scratch}}/{number}", "--cores", str(cores()))
    return Cell(f"{number:,} clients", "fedbench", arguments, many_clients(number))


def _keeping(row: str, clients: int, *options: str) -> Cell:
    return Cell(row, "fedbench", options, keeping_clients(clients), module="kept_clients")


WORKLOADS = (
    Workload("w1", "FedAvg, CNN on 50,000 images of 32 px, 10 of 100 clients", _training(CNN, also_one_core=True)),
    Workload(
        "w2",
        "FedAvg, linear head on 50,000 x 512 features, 10 of 100 clients",
        _training(HEAD, also_one_core=True),
    ),
    Workload(
        "w3",
        "PromptFL of the suite longtail, 8 of 20 clients",
        (_executor("sequential", "iid"), _executor("cohort", "iid")),
    ),
    Workload(
        "w3-skew",
        "the same, dealt by a Dirichlet of 0.5",
        (_executor("sequential", "dirichlet"), _executor("cohort", "dirichlet")),
    ),
    Workload(
        "w4",
        "the suite longtail, a whole command",
        (
            _suite("empty caches", "first"),
            _suite("filled caches, other seeds", "second", "--seed", "2", "--seed", "3"),
        ),
    ),
    Workload("w5", "W2's head, 100 clients a round of ever more", tuple(map(_clients, (1_000, 10_000, 100_000)))),
    Workload("w6", "200 runs of FedAvg's head of the suite longtail", (_short_runs("fedavg", 200),)),
    Workload("w7", "60 runs of PromptFL of the suite longtail", (_short_runs("promptfl", 60),)),
    Workload(
        "w8",
        "SCAFFOLD on ResNet-18, 10 clients a round, a checkpoint after each",
        (
            _keeping("50 clients, in memory", 50),
            _keeping("1,000 clients, 1 GB", 1_000, "--state-memory", "1"),
        ),
    ),
    Workload("tiny-head", "for tests", _training(TINY_HEAD, also_one_core=False), hidden=True),
)


def obstacle(system: str, pythons: Mapping[str, str]) -> str | None:
    """Why ``system`` can't be run here; None where it can."""
    if system not in PEERS:
        return None
    python, distribution = pythons.get(system, sys.executable), PEERS[system]
    code = f"from importlib.metadata import version; version({distribution!r})"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True)
    except OSError as error:
        return f"{python} can't be run: {error.strerror}"
    return f"{distribution} is not installed for {python}" if found.returncode else None


def command(cell: Cell, pythons: Mapping[str, str], scratch: Path, data: Path | None, folder: Path) -> list[str]:
    """The command line; job and report are files in ``folder``, which is the cell's own."""
    python = pythons.get(cell.system, sys.executable)
    arguments = [argument.format(scratch=scratch, common=folder.parent / "common") for argument in cell.arguments]
    if cell.is_suite:
        return [python, "-c", SUITE, *arguments]
    told = ["--report", str(folder / "report.json")]
    if cell.job is not None:
        cell.job.write(folder / "job.json")
        told += ["--job", str(folder / "job.json"), "--data", str(data)]
    module = cell.module or MODULES[cell.system]
    return [python, "-m", f"tests.bench.systems.{module}", *told, *arguments]


def environment(folder: Path) -> dict[str, str]:
    """One intra-op thread, no accelerator, no telemetry; peers keep their own files in ``folder``."""
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "TERM": "dumb", "COLUMNS": "120"}
    homes = {"FLWR_HOME": str(folder / "flwr")}
    # Ray's sockets lie there, and a system takes no path of more than about a hundred characters
    if len(str(folder)) <= RAY_LONGEST:
        homes["RAY_TMPDIR"] = str(folder)
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {**os.environ, **threads, "CUDA_VISIBLE_DEVICES": "", **quiet, **homes}

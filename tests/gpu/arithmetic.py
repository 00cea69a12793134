"""What the device computes: the most it reaches in a precision, and the operations that a workload asks for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import lru_cache, partial

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedbench.core.records import RoundRecord
from fedbench.rounds.executors import graphs
from fedbench.rounds.loop import start, train_round
from fedbench.rounds.run import Run
from fedbench.toolkit.local_training import round_table
from tests.gpu.table import Line, Place, Row

SIDE, TINY_SIDE = 8192, 256
NO_TF32 = "skipped: a CPU has no TF32"


def ceilings(place: Place) -> Iterator[Row]:
    """The `ceiling` of every precision as a row."""
    side = TINY_SIDE if place.is_tiny else SIDE

    def measured(precision: str) -> Line:
        if precision == "tf32" and place.device == "cpu":
            return Line(found=NO_TF32)
        return Line(tflops=ceiling(precision, place.device, side), found="the ceiling of what follows")

    for precision in ("float32", "tf32", "bfloat16"):
        yield Row(f"product of two matrices of {side} x {side}", precision, partial(measured, precision))


@lru_cache
def ceiling(precision: str, device: str, side: int) -> float:
    """TFLOP/s of a product of two square matrices, the median of five goes of four; measured once a command."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(one)
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        seconds = []
        for go in range(7):
            began = time.perf_counter()
            for _ in range(4):
                torch.mm(one, other, out=out)
            synchronised(device)
            if go > 1:  # the first two warm up
                seconds.append(time.perf_counter() - began)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    return 4 * 2 * side**3 / sorted(seconds)[2] / 1e12


def synchronised(device: str) -> None:
    """Wait till the device has done all it was told."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def flops_of_an_image(run: Run) -> float:
    """Operations of a round by the images that it trains on, forward and backward, counted by torch while ``run`` takes
    its first round one client after another.

    Counted are matrix products, convolutions and attention, a product with a sum as two; nothing else.
    """
    graphs.IS_ON = False
    state = run.initial_state()
    start(run, state)
    counter = FlopCounterMode(display=False)
    with counter:
        _, record = train_round(run, state)
    return counter.get_total_flops() / work_of(run, record)[0]


def work_of(run: Run, record: RoundRecord) -> tuple[int, int]:
    """The images that the clients of a round train on, and their local steps, summed over clients."""
    sizes, training = run.federation.shards.sizes, run.spec.training
    tables = [round_table(int(sizes[client]), training, torch.Generator()) for client in record.cohort]
    return sum(len(batch) for table in tables for batch in table), sum(map(len, tables))

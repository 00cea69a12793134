"""Tiny runs of a method on the device and on the CPU."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from fedbench.rounds.executors import ExecutorName
from fedbench.rounds.loop import evaluate
from fedbench.rounds.state import RunState, all_tensors, load_state, save_state
from fedbench.testing import final_state, tiny_run, tiny_spec
from tests.gpu.table import Line

TOLERANCE = 1e-3
"""Of the largest weight of a tensor, after two rounds in float32 without TF32. Sums and matrix products are taken in
another order there; Adam's first steps, which divide by a gradient's own size, make most of it."""
EXECUTORS: tuple[ExecutorName, ...] = ("sequential", "auto")


def compare(name: str, device: str) -> Line:
    """The method ``name`` with both executors: how far its weights are from the CPU's, and that it resumes."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    began = time.perf_counter()
    try:
        spec = tiny_spec(name, rounds=2)
        there = spec.model_copy(update={"device": device})
        worst, where = 0.0, ""
        for executor in EXECUTORS:
            wanted = final_state(tiny_run(spec, executor=executor))
            run = tiny_run(there, executor=executor)
            half = final_state(run, until=1)
            evaluate(run, final_state(run, _saved(half, spec.run_id, device)))
            found, tensor = largest_difference(final_state(run), wanted)
            if found > worst:
                worst, where = found, tensor
    except Exception as error:
        return Line(name, "tiny", time.perf_counter() - began, found=f"fails: {_first_line(error)}", has_failed=True)
    seconds = time.perf_counter() - began
    text = f"{worst:.1e} of {where}" if where else "the CPU's weights to the bit"
    has_failed = not worst <= TOLERANCE
    return Line(name, "tiny", seconds, found=text + (", too far" if has_failed else ""), has_failed=has_failed)


def largest_difference(found: RunState, wanted: RunState) -> tuple[float, str]:
    """By how much of the largest value of the same tensor the two differ at most, and in which tensor."""
    ours, theirs = all_tensors(found), all_tensors(wanted)
    if ours.keys() != theirs.keys():
        raise ValueError(f"other tensors than on the CPU: {sorted(ours.keys() ^ theirs.keys())[0]}")
    parts = [
        (float((ours[name].cpu() - tensor).abs().max() / (tensor.abs().max() + 1e-3)), name)
        for name, tensor in theirs.items()
    ]
    return max(parts, default=(0.0, ""))


def _saved(state: RunState, run_id: str, device: str) -> RunState:
    """The state through a file, as after a break."""
    with tempfile.TemporaryDirectory() as folder:
        save_state(state, Path(folder) / "state.safetensors", run_id)
        return load_state(Path(folder) / "state.safetensors", run_id, device)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

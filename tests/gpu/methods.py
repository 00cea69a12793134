"""Tiny runs of a method on the device and on the CPU."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from fedbench.core.spec import RunSpec
from fedbench.rounds.executors import ExecutorName
from fedbench.rounds.loop import evaluate
from fedbench.rounds.state import RunState, all_tensors, load_state, save_state
from fedbench.testing import final_state, tiny_run, tiny_spec
from tests.gpu.table import Line

TOLERANCE = 1e-3
"""Of the largest weight of a tensor, after two rounds in float32 without TF32. Sums and matrix products are taken in
another order there; Adam's first steps, which divide by a gradient's own size, make most of it."""
TIMES_ROUNDING = 2
"""Where more is apart than that: of what the same weights are apart on the CPU if they start a rounding away. Methods
whose step depends on a sign (prograd), or on a quotient of small numbers, have large differences there, too."""
NUDGES = 3
UP_TO_SIGNS = ("flexlora",)
"""The server decomposes products, and a pair of singular vectors may have either sign."""
EXECUTORS: tuple[ExecutorName, ...] = ("sequential", "auto")


def compare(name: str, device: str) -> Line:
    """The method ``name`` with both executors: how far its weights are from the CPU's, and that it resumes."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    began = time.perf_counter()
    try:
        spec = undropped(tiny_spec(name, rounds=2))
        there = spec.model_copy(update={"device": device})
        worst, where = 0.0, ""
        for executor in EXECUTORS:
            wanted = final_state(tiny_run(spec, executor=executor))
            run = tiny_run(there, executor=executor)
            resumed = final_state(run, _saved(final_state(run, until=1), spec.run_id, device))
            evaluate(run, resumed)
            for state in (final_state(run), resumed):
                found, tensor = largest_difference(state, wanted, up_to_signs=name in UP_TO_SIGNS)
                if found > worst:
                    worst, where = found, tensor
    except Exception as error:
        return Line(name, "tiny", time.perf_counter() - began, found=f"fails: {first_line(error)}", has_failed=True)
    seconds = time.perf_counter() - began
    text = f"{worst:.1e} of {where}" if where else "the CPU's weights to the bit"
    if worst <= TOLERANCE:
        return Line(name, "tiny", seconds, found=text)
    apart = rounded_apart(spec)
    has_failed = not worst <= TIMES_ROUNDING * apart
    text += f"; {apart:.1e} on the CPU alone, from weights a rounding away" + (", too far" if has_failed else "")
    return Line(name, "tiny", seconds, found=text, has_failed=has_failed)


def undropped(spec: RunSpec) -> RunSpec:
    """``spec`` without dropout, whose masks the device draws: other ones than the CPU."""
    off = {
        name: {**values, **({"dropout": 0.0} if "dropout" in values else {})} for name, values in spec.params.items()
    }
    return spec.model_copy(update={"params": off})


def rounded_apart(spec: RunSpec) -> float:
    """How far a run on the CPU gets from itself, at most, where the weights it starts from are a rounding away."""
    wanted, found = final_state(tiny_run(spec)), []
    for seed in range(NUDGES):
        run = tiny_run(spec)
        state, generator = run.initial_state(), torch.Generator().manual_seed(seed)
        for tensor in state.weights.values():
            if tensor.is_floating_point():
                tensor *= 1 + torch.finfo(tensor.dtype).eps * torch.randn(tensor.shape, generator=generator)
        found.append(largest_difference(final_state(run, state), wanted)[0])
    return max(found)


def largest_difference(found: RunState, wanted: RunState, *, up_to_signs: bool = False) -> tuple[float, str]:
    """By how much of the largest value of the same tensor the two differ at most, and in which tensor."""
    ours, theirs = all_tensors(found), all_tensors(wanted)
    if up_to_signs:
        ours = signs_aligned(ours, theirs)
    if ours.keys() != theirs.keys():
        raise ValueError(f"other tensors than on the CPU: {sorted(ours.keys() ^ theirs.keys())[0]}")
    return max(((_apart(ours[name].cpu(), tensor), name) for name, tensor in theirs.items()), default=(0.0, ""))


def _apart(found: Tensor, wanted: Tensor) -> float:
    if not torch.equal(found.isnan(), wanted.isnan()):
        return torch.inf
    difference, size = (found - wanted).abs().nan_to_num(0), wanted.abs().nan_to_num(0)
    return float(difference.max() / (size.max() + 1e-3))


def signs_aligned(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """``ours``, in which pairs of rows of `*.A` (r, w) and columns of `*.B` (w, r) have the signs of ``theirs``."""
    aligned = dict(ours)
    for name in (key.removesuffix(".A") for key in ours if key.endswith(".A")):
        sign = (ours[f"{name}.A"].cpu() * theirs[f"{name}.A"]).sum(1).sign()
        aligned[f"{name}.A"] = ours[f"{name}.A"].cpu() * sign[:, None]
        aligned[f"{name}.B"] = ours[f"{name}.B"].cpu() * sign
    return aligned


def _saved(state: RunState, run_id: str, device: str) -> RunState:
    """The state through a file, as after a break."""
    with tempfile.TemporaryDirectory() as folder:
        save_state(state, Path(folder) / "state.safetensors", run_id)
        return load_state(Path(folder) / "state.safetensors", run_id, device)


def first_line(error: Exception) -> str:
    """Of the error's message, behind its kind."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

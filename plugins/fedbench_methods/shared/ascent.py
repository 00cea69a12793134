"""A step's gradients at weights a little uphill, which FedSAM, FedASAM and FedSpeed share.

Foret, Kleiner, Mobahi, Neyshabur, "Sharpness-Aware Minimization for Efficiently Improving Generalization", ICLR 2021;
with scales, Kwon, Kim, Park, Choi, "ASAM: Adaptive Sharpness-Aware Minimization", ICML 2021.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fedbench.api import LocalStep, StepGradients, Tensors
from fedbench.toolkit.local_training import each_model
from fedbench.toolkit.wrapping import Gradients, tried

LEAST_NORM = 1e-12
"""Divides a gradient of zero, which then moves nothing."""


def perturbation(gradients: Tensors, rho: float, scales: Tensors | None = None) -> Tensors:
    """ρ T² g / ‖T g‖ by name, the norm over all tensors; T = 1 for tensors that ``scales`` lacks."""
    known = scales or {}
    scaled = {name: known[name] * g if name in known else g for name, g in gradients.items()}
    if not scaled:
        return {}
    norm = torch.stack([value.square().sum() for value in scaled.values()]).sum().sqrt().clamp_min(LEAST_NORM)
    return {n: (rho / norm) * (known[n] * value if n in known else value) for n, value in scaled.items()}


def uphill(step: LocalStep, gradients: Tensors, rho: float, scales: Tensors | None = None) -> LocalStep:
    """``step`` at w + `perturbation`, its weights leaves that require a gradient; those without one stay as they are.

    A model that the client keeps beside the global one has a norm of its own: neither is to see the other.
    """
    moves: Tensors = {}
    for names in each_model(gradients, step.model.own):
        moves |= perturbation({name: gradients[name] for name in names}, rho, scales)
    weights = {name: (w.detach() + moves[name] if name in moves else w.detach()) for name, w in step.weights.items()}
    return replace(step, weights={n: w.requires_grad_(step.weights[n].requires_grad) for n, w in weights.items()})


def both(
    step: LocalStep, rest: Gradients, rho: float, scales: Tensors | None = None
) -> tuple[StepGradients, StepGradients]:
    """The gradients that ``rest`` gives at w and uphill of it, on one batch.

    Running statistics, and what losses keep from step to step, are those of the second pass.
    """
    first = rest(tried(step))
    return first, rest(uphill(step, first.by_name, rho, scales))

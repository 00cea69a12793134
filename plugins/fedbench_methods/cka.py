"""CKA - how alike the clients' models see the same images, layer by layer; a measure, which changes nothing.
Kornblith, Norouzi, Lee, Hinton, "Similarity of Neural Network Representations Revisited", ICML 2019, arXiv 1905.00414.

With X (n, p) and Y (n, q), two models' outputs of one layer for the same n images, their columns centred (Eq. 3, the
linear kernel):
    CKA(X, Y) = ‖Yᵀ X‖²_F / (‖Xᵀ X‖_F ‖Yᵀ Y‖_F) = ⟨X Xᵀ, Y Yᵀ⟩ / (‖X Xᵀ‖_F ‖Y Yᵀ‖_F)
    cka_global/<layer>    the mean over the cohort of CKA(client, aggregated model): FedGLCL, Fig. 1c and appendix A
    cka_clients/<layer>   the mean over the pairs of clients: CLIP2FL, Fig. 3, there of the last layer
Layers are the convolutions and linear maps that run for an image, numbered in the order in which they run, then the
logits: the larger the number, the deeper the layer. Of a head on frozen features, and of prompts, there are the logits.

Answers: measure. Stacks with every method: `cka+fedglcl` is FedGLCL, bit for bit. Off unless it is named. The papers do
not say how many images: here the first `samples` of the test split. Cost: a forward pass of these for each client of
the cohort in every evaluated round (`eval_every`), and n² numbers a layer and client; not counted as the round's time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import fedbench.api as fb
from fedbench.api import hookimpl, hyper

AT_ONCE = 256
"""Images of one forward pass; all layers' outputs for them are in memory together."""


@dataclass(frozen=True, kw_only=True)
class CkaParams:
    """What it is measured on."""

    samples: int = hyper(256, symbol="n", low=8, high=10_000, log=True, search=False, source="not the papers'")


def gram(outputs: Tensor) -> Tensor:
    """X Xᵀ (n, n) of ``outputs`` (n, ...), flattened and centred, divided by its norm; zeros of a constant layer."""
    centred = outputs.flatten(1).double()
    centred = centred - centred.mean(dim=0)
    product: Tensor = centred @ centred.T
    return product.div(product.norm().clamp(min=torch.finfo(product.dtype).tiny))


class CKA(fb.Method[CkaParams]):
    """Similarity of the clients' models, layer by layer, by round."""

    name = "cka"
    citation = "Kornblith et al., Similarity of Neural Network Representations Revisited, ICML 2019"

    @hookimpl
    def measure(self, task: fb.MeasureTask) -> dict[str, float]:
        """CKA to the aggregated model, and between clients, of every layer; clients without weights are left out."""
        inputs = task.inputs.read(torch.arange(min(len(task.inputs), self.params.samples)))
        anchor = _grams(task.model, {**task.weights, **task.buffers}, inputs) if _is_sent(task) else {}
        clients = [_grams(task.model, task.local_model(u), inputs) for u in task.updates if u.weights]
        found = {}
        for layer in clients[0] if clients else ():
            grams = [own[layer] for own in clients]
            if layer in anchor:
                found[f"cka_global/{layer}"] = _mean([float((one * anchor[layer]).sum()) for one in grams])
            if len(grams) > 1:
                found[f"cka_clients/{layer}"] = _mean([float((a * b).sum()) for a, b in combinations(grams, 2)])
        return found


def _is_sent(task: fb.MeasureTask) -> bool:
    """Whether clients keep nothing of what the model's forward pass reads: then there is an aggregated model."""
    return all(name in task.model.own for kept in task.own.values() for name in kept)


def _grams(model: fb.Model, tensors: fb.Tensors, inputs: Tensor) -> dict[str, Tensor]:
    """The normed Gram matrix of every layer, by its number and kind."""
    batches = []
    for rows in torch.split(inputs, AT_ONCE):
        with _layers() as outputs:
            logits = model.forward(tensors, rows, False).logits
        batches.append([*outputs, ("logits", logits)])
    names = [f"{number:02d}_{kind}" for number, (kind, _) in enumerate(batches[0], start=1)]
    parts = zip(*batches, strict=True)
    return {name: gram(torch.cat([out for _, out in own])) for name, own in zip(names, parts, strict=True)}


@contextmanager
def _layers() -> Iterator[list[tuple[str, Tensor]]]:
    """The outputs of all modules with a matrix or kernel of their own that run meanwhile, in that order."""
    outputs: list[tuple[str, Tensor]] = []

    def keep(module: nn.Module, _: Any, output: Any) -> None:
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim > 1 and isinstance(output, Tensor):
            outputs.append((re.sub(r"\d+d$", "", type(module).__name__).lower(), output.detach()))

    handle = register_module_forward_hook(keep)
    try:
        yield outputs
    finally:
        handle.remove()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)

"""Eight bits an entry - after Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient
Quantization and Encoding", NeurIPS 2017, with the largest entry for the norm and levels of one width.

A client sends its change d = y − x, tensor by tensor, as whole numbers and one scale, rounded at random so that the
mean is right:
    s = max |d| / 127,      c = ⌊d / s + u⌋, u uniform in [0, 1),      the server decodes s c;  E[s c] = d

Answers: upload. Stacks with whatever sends weights. Running statistics and what else clients send stay as they are.
Cost: a byte an entry and four a tensor up, down as before.
Left open: what the server sends stays in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedbench.api import NoParams, Tensors
from fedbench_methods.shared.compression import Compressor

LEVELS = 127


def quantised(values: Tensor, draws: torch.Generator) -> Tensor:
    """s c of ``values`` of any shape, rounded at random; zeros stay zeros."""
    scale = values.abs().max() / LEVELS if values.numel() else values.sum()
    if not scale > 0:
        return torch.zeros_like(values)
    shift = torch.rand(values.shape, generator=draws).to(values)
    return torch.floor(values / scale + shift).clamp(-LEVELS, LEVELS) * scale


def message_bytes(values: Tensor) -> int:
    """A byte an entry, and a float32 scale."""
    return values.numel() + 4


class Int8(Compressor[NoParams]):
    """Sends eight bits an entry, rounded at random."""

    name = "int8"
    citation = "Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NeurIPS 2017"
    feedback = False

    def encoded(self, name: str, change: Tensor, kept: Tensors, draws: torch.Generator) -> tuple[Tensor, int, Tensors]:
        """s c."""
        return quantised(change, draws), message_bytes(change), {}

"""Signs with error feedback - Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", ICML 2019, Algorithm 1; signSGD is by Bernstein et al., ICML 2018.

A client sends the sign of every entry of its change, and of what it has not sent before, with one size a tensor:
    p = y − x + e,      C(p) = (‖p‖₁ / d) sign(p),      e ← p − C(p)

Answers: upload. Stacks with whatever sends weights. Running statistics and what else clients send stay as they are.
Cost: up a bit an entry and four bytes a tensor, down as before.
Left open: the sign of zero is taken for plus one, as one bit has no third value. The server takes the mean of what it
decodes, as in the paper; a majority vote over plain signs (Bernstein et al.) is another algorithm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedbench.api import NoParams, Tensors
from fedbench_methods.shared.compression import Compressor


def scaled_signs(values: Tensor) -> Tensor:
    """(‖p‖₁ / d) sign(p) of ``values`` of any shape, +1 for the sign of zero."""
    return torch.where(values < 0, -1.0, 1.0).to(values) * values.abs().mean()


def message_bytes(values: Tensor) -> int:
    """A bit an entry, and a float32."""
    return -(-values.numel() // 8) + 4


class SignSGD(Compressor[NoParams]):
    """Sends the signs of a change, and keeps the rest for later."""

    name = "signsgd"
    citation = "Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019"

    def encoded(self, name: str, change: Tensor, kept: Tensors, draws: torch.Generator) -> tuple[Tensor, int, Tensors]:
        """C(p)."""
        return scaled_signs(change), message_bytes(change), {}

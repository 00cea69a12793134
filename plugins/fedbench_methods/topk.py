"""Top-k - Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018; in federated learning Sattler et al.,
"Robust and Communication-Efficient Federated Learning from Non-IID Data", IEEE TNNLS 2020.

Of its change, and of what it has not sent before, a client sends the largest entries of every tensor:
    p = y − x + e,      C(p) has the ⌈κ d⌉ entries of p that are largest in size, else zeros,      e ← p − C(p)

Answers: upload. Stacks with whatever sends weights. Running statistics and what else clients send stay as they are.
Cost: up, a kept entry takes four bytes and its place four more, or all places together a bit an entry where that is
less; down as before. κ = 1 is FedAvg bit for bit.
Left open: κ is a share of each tensor, not of all of them together; e is a client's own (not reset between rounds).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from fedbench.api import ClientTask, Tensors, Update, hookimpl, hyper
from fedbench_methods.shared.compression import Compressor


@dataclass(frozen=True, kw_only=True)
class TopKParams:
    """Hyper-parameters of top-k."""

    share: float = hyper(
        0.1, symbol="κ", low=1e-4, high=1.0, log=True, neutral=1.0, search=False, source="Sattler et al.: 1/400 to 1/25"
    )


def largest(values: Tensor, share: float) -> tuple[Tensor, int]:
    """``values`` with all but the largest ⌈share d⌉ entries at zero, and their number."""
    count = ceil(share * values.numel() - 1e-9)
    flat = values.flatten()
    places = flat.abs().topk(count).indices
    return torch.zeros_like(flat).index_copy(0, places, flat[places]).view(values.shape), count


def message_bytes(entries: int, kept: int) -> int:
    """The bytes that ``kept`` of ``entries`` float32 take, with their places as int32 or as a bit an entry."""
    return 4 * kept + min(4 * kept, -(-entries // 8))


class TopK(Compressor[TopKParams]):
    """Sends the largest entries of a change, and keeps the rest for later."""

    name = "topk"
    citation = "Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018"

    def encoded(self, name: str, change: Tensor, kept: Tensors, draws: torch.Generator) -> tuple[Tensor, int, Tensors]:
        """C(p)."""
        decoded, count = largest(change, self.params.share)
        return decoded, message_bytes(change.numel(), count), {}

    @hookimpl
    def upload(self, task: ClientTask, update: Update) -> Update:
        """x + C(p), or the update as it is."""
        return update if self.params.share == 1 else super().upload(task, update)

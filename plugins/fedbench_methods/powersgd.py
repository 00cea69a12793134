"""PowerSGD - Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019, Algorithms 1 and 2, on the change of a client's round.

Of a matrix p = y − x + e (n, m) a client sends two factors, by one step of the power method that goes on from its last:
    P = p Q (n, r),      P ← orthonormal columns of P,      Q = pᵀ P (m, r),      C(p) = P Qᵀ,      e ← p − C(p)
Q is drawn from N(0, 1) before the client's first round. Tensors of more than two dimensions are matrices of their first
by all others; vectors, and matrices that two factors are no smaller than, are sent as they are.

Answers: upload. Stacks with whatever sends weights. Running statistics and what else clients send stay as they are.
Cost: up r (n + m) floats for n m, down as before.
Left open: in the paper all workers share one Q, of which each sends its part of P and then of Q; clients of a cohort
share nothing, and each has its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.api import Tensors, hyper
from fedbench_methods.shared.compression import Compressor


@dataclass(frozen=True, kw_only=True)
class PowerSGDParams:
    """Hyper-parameters of PowerSGD."""

    rank: int = hyper(2, symbol="r", low=1, high=256, search=False, source="paper: 1, 2 or 4")


def factors(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """P (n, r) and Q (m, r) of a ``matrix`` (n, m), from the last Q ``basis``."""
    left = torch.linalg.qr(matrix @ basis).Q
    return left, matrix.T @ left


class PowerSGD(Compressor[PowerSGDParams]):
    """Sends a change of low rank, and keeps the rest for later."""

    name = "powersgd"
    citation = "Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression, NeurIPS 2019"

    def encoded(self, name: str, change: Tensor, kept: Tensors, draws: torch.Generator) -> tuple[Tensor, int, Tensors]:
        """C(p), and Q for the next time."""
        rank, entries = self.params.rank, change.numel()
        matrix = change.reshape(len(change), -1) if change.ndim > 1 else change.reshape(1, -1)
        if rank * sum(matrix.shape) >= entries:
            return change, 4 * entries, {}
        basis = kept["basis"] if "basis" in kept else torch.randn(matrix.shape[1], rank, generator=draws).to(matrix)
        left, right = factors(matrix, basis)
        return (left @ right.T).view(change.shape), 4 * rank * sum(matrix.shape), {"basis": right}

"""Drift - how far and how differently clients move in a round; a measure, which changes nothing.

With Δ_k = w_k - w, from the weights that client k received to those it sends up, and p_k = n_k / Σ n over the cohort:
    drift                  Σ_k p_k ‖Δ_k‖
    update_cosine          the mean of cos(Δ_k, Δ_l) over the pairs of clients
    update_dissimilarity   B = (Σ_k p_k ‖Δ_k‖² / ‖Σ_k p_k Δ_k‖²)^(1/2)
B is the local dissimilarity of Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Definition 3,
with updates in place of gradients: 1 where all clients move alike, and larger the more they pull apart.

Answers: measure. Stacks with every method: `drift+fedprox` is FedProx, bit for bit, with three metrics more by round.
Off unless it is named. Cost: a pass over the cohort's updates in every evaluated round, and a product of theirs,
O(m² P) for m clients of P weights; not counted as the round's time. Clients that send no weights are left out.
"""

from __future__ import annotations

import torch

from fedbench.api import MeasureTask, Method, NoParams, Tensors, hookimpl


class Drift(Method[NoParams]):
    """Lengths and angles of the clients' updates, by round."""

    name = "drift"
    citation = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020 (dissimilarity)"

    @hookimpl
    def measure(self, task: MeasureTask) -> dict[str, float]:
        """The three of the cohort's updates; a cosine needs two of them, a dissimilarity one that is not zero."""
        updates = [update for update in task.updates if update.weights]
        if not updates:
            return {}
        moves = torch.stack([_moved(task.tasks[update.client].received, update.weights) for update in updates])
        shares = torch.tensor([float(update.num_examples) for update in updates], device=moves.device)
        shares = (shares / shares.sum()).to(moves.dtype)
        lengths = moves.norm(dim=1)
        found = {"drift": float((shares * lengths).sum())}
        apart = lengths[:, None] * lengths
        pairs = torch.triu(apart > 0, diagonal=1)
        if pairs.any():
            found["update_cosine"] = float(((moves @ moves.T)[pairs] / apart[pairs]).mean())
        mean = (shares @ moves).norm()
        if mean > 0:
            found["update_dissimilarity"] = float(((shares * lengths**2).sum() / mean**2).sqrt())
        return found


def _moved(received: Tensors, sent: Tensors) -> torch.Tensor:
    """All weights after less before, as one vector, float64."""
    return torch.cat([(sent[name] - received[name]).flatten().double() for name in sorted(sent)])

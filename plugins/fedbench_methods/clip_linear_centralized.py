"""CLIP-FC-Centralized - a linear classifier on frozen CLIP features, trained on all clients' data pooled: the upper
bound of FST-CBDG (Yan and Guo, "Lightweight Unsupervised Federated Learning with Pretrained Vision Language Model",
arXiv 2404.11046, 2024).

Minimises cross-entropy of  s (W I + b),  W_0 = text features, b_0 = 0, over the pooled labelled training data.

Answers: federate (one client that holds everything; the harness's own training and head do the rest, so it equals
FedAvg with one client bit for bit). Not a federated method: the leaderboard's MB column counts that one client.
Left open: epochs, batch, scale and initialisation are not in the paper, whose bound is far from a converged probe. Here
epochs are rounds x local_epochs of the run, the scale CLIP's own; `head_scale=1 lr=0.01 rounds=10 batch_size=50` is the
reading closest to the paper.
"""

from __future__ import annotations

from fedbench.api import Federation, Method, NoParams, RunSpec, hookimpl
from fedbench_methods.shared.clients import pooled


class ClipLinearCentralized(Method[NoParams]):
    """Linear head on pooled CLIP features, an upper bound."""

    name = "clip-linear-centralized"
    citation = "Yan and Guo, Lightweight Unsupervised Federated Learning, arXiv 2404.11046, 2024"

    @hookimpl
    def federate(self, federation: Federation, spec: RunSpec) -> Federation:
        """One client holding the pooled data."""
        return pooled(federation)

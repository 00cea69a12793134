"""FedSA-LoRA - Guo, Zeng, Wang, Fan, Wang, Qu, "Selective Aggregation for Low-Rank Adaptation in Federated Learning",
ICLR 2025; arXiv 2410.01463.

Of every low-rank addition γ B A clients train both factors, but share A alone: what A learns is said to be general,
what B learns is the client's own.
    A ← Σ_i p_i A_i;   B_i stays with client i

Answers: private. Stacks on a learner with such factors (clip-lora+fedsa-lora), of which it knows the names `*.A` and
`*.B`; with methods that add loss terms, and with server steps, which then act on A. Not with another personalisation.
r w floats a projection are sent each way, half of CLIP-LoRA's.
The global model has the B that all clients began with: zero, so it stays zero-shot CLIP, and so does a client that has
not taken part. What the paper reports are own models. Its recipe (r = 8, α = 16, SGD 0.02, ten local steps) is of
language models, and r and α are the learner's. A classifier on top, private in the paper, CLIP has none.
B of a client whose update was lost stays as it was trained.
"""

from __future__ import annotations

from collections.abc import Collection

from fedbench.api import Method, Model, NoParams, RunSpec, hookimpl
from fedbench.toolkit.low_rank import pairs_of


class FedSALoRA(Method[NoParams]):
    """Shares A and keeps B of every low-rank addition."""

    name = "fedsa-lora"
    citation = "Guo et al., Selective Aggregation for Low-Rank Adaptation in FL, ICLR 2025"
    needs_learner = "clip-lora"
    keeps_lost_training = True

    @hookimpl
    def private(self, model: Model, spec: RunSpec) -> Collection[str]:
        """Every B. Raises Unworkable for a model without low-rank factors."""
        return [f"{name}.B" for name in pairs_of(model.weights.keys() - model.own, self.name)]

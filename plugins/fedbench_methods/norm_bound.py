"""Norm bounding - Sun, Kairouz, Suresh, McMahan, "Can You Really Backdoor Federated Learning?", arXiv 1911.07963, 2019.

No client's change may be longer than M: from the received weights x and the client's y_k,
    Δ_k = y_k − x,      y_k ← x + Δ_k / max(1, ‖Δ_k‖ / M)
before the server takes their mean.

Wraps: aggregate, whose rest gets the shortened updates. So it stacks with any learner and any server step.
Nothing more is sent. Running statistics and what else clients send are as they sent it. Where no
change is longer than M, and with M = 0, which is off, it is FedAvg bit for bit.
Left open: M. The paper sets it below the length of honest changes, which `norm_bound_shortened`, the recorded share of
shortened updates, shows. Its second defence, noise at the server, is `dp`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedbench.api import AggregationTask, Method, hyper, wrapper
from fedbench.toolkit.wrapping import Aggregate, Aggregated
from fedbench_methods.shared.robust import shortened


@dataclass(frozen=True, kw_only=True)
class NormBoundParams:
    """Hyper-parameters of norm bounding."""

    bound: float = hyper(
        0.1,
        symbol="M",
        low=1e-4,
        high=1e4,
        log=True,
        off=0.0,
        search=(0.01, 10.0),
        source="paper: by the honest lengths",
    )


class NormBound(Method[NormBoundParams]):
    """Shortens long changes before the mean."""

    name = "norm-bound"
    citation = "Sun et al., Can You Really Backdoor Federated Learning?, arXiv 1911.07963, 2019"
    role = "defence"
    requires = ("global_model", "sent_weights")

    @wrapper
    def aggregate(self, task: AggregationTask, rest: Aggregate) -> Aggregated:
        """The stack's answer to the shortened updates."""
        if not self.params.bound or not task.weights:
            return rest(task)
        updates = tuple(shortened(u, task.weights, self.params.bound) for u in task.updates)
        changed = sum(new is not old for new, old in zip(updates, task.updates, strict=True))
        task.metrics["norm_bound_shortened"] = changed / len(updates)
        return rest(replace(task, updates=updates))

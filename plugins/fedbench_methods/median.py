"""Coordinate-wise median - Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates", ICML 2018, Algorithm 1, Option I.

From the clients' y_k the server takes, for every coordinate j by itself,
    x[j] ← median_k y_k[j]        (the mean of the two in the middle for an even number)

Wraps: aggregate, to whose rest every client has sent the median. So it stacks with any learner and any server step
(`promptfl+fedadam+median`). Running statistics have their median as well; what else clients send (class gradients,
prototypes) is as they sent it. Nothing more is sent. All clients count alike, whatever the run's weighting.
"""

from __future__ import annotations

from torch import Tensor

from fedbench.api import AggregationTask, GlobalModel, Method, NoParams, wrapper
from fedbench.toolkit.wrapping import Aggregate
from fedbench_methods.shared.robust import answer_to, by_coordinate


def middle(values: Tensor) -> Tensor:
    """The median over the clients of (m, ...): (...)."""
    return values.quantile(0.5, dim=0)


class Median(Method[NoParams]):
    """Takes the median of every coordinate for the mean."""

    name = "median"
    citation = "Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018"
    role = "defence"
    requires = ("global_model", "sent_weights")
    prevents: tuple[str, ...] = ("weighed_clients", "own_updates")

    @wrapper
    def aggregate(self, task: AggregationTask, rest: Aggregate) -> GlobalModel:
        """The stack's answer to the median."""
        return answer_to(by_coordinate(task.updates, middle), task, rest)

"""Coordinate-wise trimmed mean - Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards
Optimal Statistical Rates", ICML 2018, Algorithm 1, Option II.

From the y_k of a cohort of m the server leaves out, for every coordinate j by itself, the β m smallest and the β m
largest values, and takes the mean of the rest:
    x[j] ← mean of the m − 2 ⌊β m⌋ values in the middle of y_1[j] ... y_m[j]

Wraps: aggregate, to whose rest every client has sent this mean. So it stacks with any learner and any server step.
Running statistics are trimmed as well; what else clients send is as they sent it. Nothing more is sent. The rest counts
alike, whatever the run's weighting. Where ⌊β m⌋ = 0 nothing is done: FedAvg bit for bit.
Left open: β has to be at least the share of attackers, and below one half.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbench.api import AggregationTask, Method, hyper, wrapper
from fedbench.toolkit.wrapping import Aggregate, Aggregated
from fedbench_methods.shared.robust import answer_to, by_coordinate


@dataclass(frozen=True, kw_only=True)
class TrimmedMeanParams:
    """Hyper-parameters of the trimmed mean."""

    trim: float = hyper(
        0.25, symbol="β", low=0.0, high=0.49, neutral=0.0, search=(0.05, 0.45), source="paper: the share of attackers"
    )


def trimmed(values: Tensor, cut: int) -> Tensor:
    """The mean of (m, ...) without the ``cut`` smallest and largest of each coordinate: (...)."""
    kept = values.sort(dim=0).values[cut : len(values) - cut]
    return kept.double().mean(dim=0).to(values.dtype)


class TrimmedMean(Method[TrimmedMeanParams]):
    """Leaves the extreme values of every coordinate out of the mean."""

    name = "trimmed-mean"
    citation = "Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018"
    role = "defence"
    requires = ("global_model", "sent_weights")
    prevents: tuple[str, ...] = ("weighed_clients", "own_updates")

    def __init__(self, params: TrimmedMeanParams) -> None:
        super().__init__(params)
        self.prevents = self.prevents if params.trim else ()

    @wrapper
    def aggregate(self, task: AggregationTask, rest: Aggregate) -> Aggregated:
        """The stack's answer to the trimmed mean."""
        cut = int(self.params.trim * len(task.updates) + 1e-9)
        if not cut:
            return rest(task)
        return answer_to(by_coordinate(task.updates, lambda values: trimmed(values, cut)), task, rest)

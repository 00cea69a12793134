"""Krum and Multi-Krum - Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine
Tolerant Gradient Descent", NeurIPS 2017.

Of a cohort of m with f attackers the server believes the clients whose updates y_i are nearest to others:
    s(i) = Σ ‖y_i − y_j‖² over the m − f − 2 nearest j ≠ i;      x ← mean of the y_i with the `selected` lowest s(i)
Krum takes one of them (`selected=1`, the default), Multi-Krum several; 0 stands for the m − f of its usual form.

Wraps: aggregate, whose rest gets the updates of the selected clients alone, weighs them as the run does, and averages
their running statistics. So it stacks with any learner and any server step. Nothing more is sent. f is ⌊`attackers` m⌋.
With f = 0 and `selected=0` all are selected: FedAvg bit for bit.
Left open: the proof takes 2 f + 2 < m; smaller cohorts with attackers end the run with a sentence. At least the nearest
one counts, also where m - f - 2 is none. Ties go to the first client.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.api import AggregationTask, GlobalModel, Method, Unworkable, hyper, wrapper
from fedbench.toolkit.wrapping import Aggregate
from fedbench_methods.shared.robust import answer_to, squared_distances


@dataclass(frozen=True, kw_only=True)
class KrumParams:
    """Hyper-parameters of Krum."""

    attackers: float = hyper(
        0.2, symbol="f/m", low=0.0, high=0.49, neutral=0.0, search=False, source="as in the scenario"
    )
    selected: int = hyper(
        1, symbol="m'", low=1, high=1000, off=0, search=False, source="paper: 1 is Krum, more Multi-Krum"
    )


def scores(distances: Tensor, attackers: int) -> Tensor:
    """s(i) (m,) of squared ``distances`` (m, m) with f ``attackers``."""
    others = distances.sort(dim=1).values[:, 1:]  # the smallest is the client's own
    return others[:, : max(len(distances) - attackers - 2, 1)].sum(dim=1)


class Krum(Method[KrumParams]):
    """Believes the clients whose updates are nearest to others."""

    name = "krum"
    citation = "Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017"
    role = "defence"
    requires = ("global_model", "sent_weights")

    def __init__(self, params: KrumParams) -> None:
        super().__init__(params)
        self.prevents = ("own_updates",) if params.selected == 1 else ()

    @wrapper
    def aggregate(self, task: AggregationTask, rest: Aggregate) -> GlobalModel:
        """The stack's answer to the selected updates."""
        count = len(task.updates)
        attackers = int(self.params.attackers * count + 1e-9)
        selected = min(self.params.selected or count - attackers, count)
        if attackers and 2 * attackers + 2 >= count:
            raise Unworkable(
                f"krum can't find {attackers} attackers among {count} updates, for which it needs {2 * attackers + 3}; "
                "raise scenario.participation or lower krum.attackers."
            )
        best = (
            scores(squared_distances(task.updates), attackers).argsort(stable=True)[:selected]
            if selected < count
            else torch.arange(count)
        )
        return answer_to(tuple(task.updates[at] for at in sorted(best.tolist())), task, rest)

"""Clients in turn - Li and Lyu, "Convergence Analysis of Sequential Federated Learning on Heterogeneous Data", NeurIPS
2023; cyclic weight transfer, Chang et al., JAMIA 2018.

The cohort's clients train one after another on one model, in an order π drawn anew every round:
    w_{π(1)} from wᵗ,   w_{π(m)} from w_{π(m−1)},   wᵗ⁺¹ = w_{π(M)}                                   (Algorithm 1)
M clients take the steps of one that has the data of all, but sees them client by client.

Answers: turns. Wraps: aggregate (all updates have the last one's weights). Stacks with any learner and personalisation,
and with local objectives and server steps that do not need the server's model at every client. What makes something
of the clients' differences (`feddf`, `fedbe`, `fedlaw`) needs `end=mean`: else it has M times one model. What a loss
compares with (`fedprox`) is the model that the client was handed. What a client keeps to itself stays with it.
`end=mean` averages all w_{π(m)} as FedAvg does; so does the released code of CAPT at a global mean. With one client a
round it is FedAvg, bit for bit.
Left open: who is late or lost. Its model has gone on to the next client; the server takes the last update that arrives.
The optimiser's momentum begins anew with every client.
Cost: bytes as FedAvg, counted by way of the server. A round lasts as long as all clients together; clients do not train
at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import fedbench.api as fb
from fedbench.toolkit.wrapping import Aggregate, Aggregated
from fedbench_methods.shared.clients import drawn_order


@dataclass(frozen=True, kw_only=True)
class InTurnParams:
    """Hyper-parameters of clients in turn."""

    end: Literal["last", "mean"] = fb.hyper("last", symbol="wᵗ⁺¹", source="Algorithm 1; mean: released code of CAPT")


class InTurn(fb.Method[InTurnParams]):
    """Clients train one after another, each from where the last one ended."""

    name = "in-turn"
    citation = "Li and Lyu, Convergence Analysis of Sequential FL on Heterogeneous Data, NeurIPS 2023"
    role = "aggregation"
    requires = ("global_model",)
    prevents: tuple[str, ...] = ("sent_start", "weighed_clients")

    def __init__(self, params: InTurnParams) -> None:
        super().__init__(params)
        if params.end == "mean":
            self.prevents = ("sent_start",)

    @fb.hookimpl
    def turns(self, clients: tuple[int, ...], round: int, spec: fb.RunSpec) -> Sequence[int]:
        """π, the same for all methods of a seed."""
        return drawn_order(clients, round, spec.seed)

    @fb.wrapper
    def aggregate(self, task: fb.AggregationTask, rest: Aggregate) -> Aggregated:
        """What the stack makes of the last model, or with `end=mean` of all."""
        if self.params.end == "mean":
            return rest(task)
        arrived = {update.client: update for update in task.updates}
        last = arrived[drawn_order(arrived, task.round, task.spec.seed)[-1]]
        alike = tuple(replace(update, weights=last.weights, buffers=last.buffers) for update in task.updates)
        answer = rest(replace(task, updates=alike))
        return answer if isinstance(answer, fb.GlobalModel) else fb.GlobalModel(answer, last.buffers)

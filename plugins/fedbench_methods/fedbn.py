"""FedBN - Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
ICLR 2021; arXiv 2102.07623.

Every client keeps its batch-norm layers, the scale and shift that it trains as well as the running mean and variance;
all the rest ψ is averaged:
    ψ^{t+1} = (1/m) Σ_k ψ_k over the m participants,     (γ_k, β_k, μ_k, σ²_k) stay with client k
Client k is evaluated with ψ and its own layers, on its own data: the columns `personal_...`.

Answers: private, aggregate, evaluate. Stacks with methods that change the loss or the model, not with those that answer
`aggregate`, as most with a server of their own do. Batch-norm is found by type, not by name: the released code looks
for "bn" in the names, which misses the layers inside a torchvision ResNet's shortcuts. Without batch-norm (`convnet`, a
head on CLIP) nothing is private, and it is FedAvg with weighting=uniform bit for bit: choose a backbone that has some,
`resnet8` for one.
The mean is plain as in the released code, whatever the run's weighting; `weighting=samples` weights it by n_k.
The paper has no global model. The columns of one global model need a rule, which is this harness's and not the paper's:
ψ with the unweighted mean of the layers of all clients that have taken part; before any has, the initial ones. A client
that has not taken part is scored with the same layers, also in `personal_...`; it trains from the initial ones. Layers
stay as trained where the update was lost: they are the client's alone.
The code's plain SGD at lr 0.01 and its truncated training sets are those of its comparison, so there is no recipe.
Cost: FedAvg's, less the batch-norm entries each way, which are kept once a client and saved with the run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.api import hookimpl, hyper
from fedbench.toolkit.fedavg import largest_logit, mean_model, predicted_classes, weighted_mean


@dataclass(frozen=True, kw_only=True)
class FedBnParams:
    """Hyper-parameters of FedBN."""

    weighting: Literal["uniform", "samples"] = hyper("uniform", symbol="1/m", source="released code; samples as FedAvg")


def mean_layers(own: Mapping[int, fb.Tensors]) -> fb.Tensors:
    """The unweighted mean of the clients' private tensors by name; counters (integers) are the first client's."""
    clients = [own[client] for client in sorted(own)]
    shares = torch.full((len(clients),), 1 / len(clients), dtype=torch.float64)

    def mean(name: str, first: Tensor) -> Tensor:
        return weighted_mean([each[name] for each in clients], shares) if first.is_floating_point() else first

    return {name: mean(name, first) for name, first in clients[0].items()}


class FedBN(fb.Method[FedBnParams]):
    """Batch-norm layers stay with the clients."""

    name = "fedbn"
    citation = "Li et al., FedBN: FL on Non-IID Features via Local Batch Normalization, ICLR 2021"
    keeps_lost_training = True
    prevents: tuple[str, ...] = ("weighed_clients",)

    def __init__(self, params: FedBnParams) -> None:
        super().__init__(params)
        self.prevents = () if params.weighting == "samples" else self.prevents

    @hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """All weights and running statistics of batch-norm layers."""
        return model.batch_norm

    @hookimpl
    def aggregate(self, task: fb.AggregationTask) -> fb.GlobalModel:
        """The plain mean of what is not private, weights and running statistics (of other layers) alike."""
        return mean_model(task, self.params.weighting)

    @hookimpl
    def evaluate(self, task: fb.EvaluationTask) -> fb.Predictions:
        """Each client's own model; globally, and for one without layers of its own, with the mean of the layers."""
        if task.client is not None or not task.own:
            return largest_logit(task)
        mean = mean_layers(task.own)
        weights = {name: mean.get(name, tensor) for name, tensor in task.weights.items()}
        buffers = {name: mean.get(name, tensor) for name, tensor in task.buffers.items()}
        whole = largest_logit(replace(task, weights=weights, buffers=buffers, private=frozenset()))
        models = {
            client: task.own_model(client) if client in task.own else (weights, buffers) for client in task.clients
        }
        return replace(whole, by_client={client: predicted_classes(task, *model) for client, model in models.items()})

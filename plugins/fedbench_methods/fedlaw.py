"""FedLAW - Li, Lin, Shang, Wu, "Revisiting Weighted Aggregation in Federated Learning with Neural Networks", ICML 2023.

The server learns the weights of the mean, and how much to shrink it, on labelled samples of its own:
    min over a, b  CE(γ Σ_{k∈S} λ_k y_k),    λ = softmax(a),  γ = exp(b),    x ← γ Σ λ_k y_k
by epochs of Adam, from a_k = log p_k and b = 0, every round anew. γ < 1 is the paper's point: a weight decay of the
global model.

Answers: aggregate. Requires server_labels and whole models. Stacks with methods that change what clients do, and under
any server step. No epochs is FedAvg bit for bit. Nothing more is sent. The recorded metric `fedlaw_gamma` is γ.
Batch-norm layers are in train mode meanwhile, and their statistics, from the clients' mean on, those of the server's
samples, as in the released code. On a text-initialised head γ scales the logits.
Left open / contradicted: the released code halves the rate every 20 epochs, of which there are 20; it has λ and γ as
squares as well, and a two-stage variant with weight averaging, neither offered here. Its proxy set is balanced, as
`scenario.server_samples` is; its learning rate is 0.01 on CIFAR-10 and 0.005 elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.api import AggregationTask, GlobalModel, Method, Tensors, diverged, hookimpl, hyper
from fedbench.toolkit.fedavg import average_buffers, mean_model, participant_shares
from fedbench.toolkit.local_training import batch_table
from fedbench.toolkit.losses import mean_cross_entropy
from fedbench.toolkit.server_training import batch_field, granted

HALVED_EVERY = 20
"""Epochs."""


@dataclass(frozen=True, kw_only=True)
class FedLAWParams:
    """Hyper-parameters of FedLAW."""

    epochs: int = hyper(20, symbol="E_s", low=1, high=1000, log=True, neutral=0, search=False, source="released code")
    lr: float = hyper(
        0.01,
        symbol="η_s",
        low=1e-5,
        high=1.0,
        log=True,
        search=(1e-3, 0.1),
        needs="epochs",
        source="released code, CIFAR-10: 0.01; else 0.005",
    )
    batch_size: int = batch_field("the released code takes the run's own")


def mixed(trained: Tensors, logits: Tensor, log_scale: Tensor) -> Tensors:
    """γ Σ λ_k y_k by name, from the y_k (m, ...), a (m,) and b, a scalar, of one device."""
    weights = log_scale.exp() * torch.softmax(logits, 0)
    return {name: torch.tensordot(weights.to(y.dtype), y, dims=1) for name, y in trained.items()}


class FedLAW(Method[FedLAWParams]):
    """Learns the weights of the mean, and its size, on the server's samples."""

    name = "fedlaw"
    citation = "Li et al., Revisiting Weighted Aggregation in Federated Learning with Neural Networks, ICML 2023"
    requires = ("server_labels", "whole_model", "own_updates")

    @hookimpl
    def aggregate(self, task: AggregationTask) -> GlobalModel:
        """γ Σ λ_k y_k, with the running statistics that it met."""
        params, weighting = self.params, task.spec.training.weighting
        if not params.epochs or not task.weights:
            return mean_model(task, weighting)
        data = granted(task)
        assert data.labels is not None, "the harness grants what `requires` names"
        trained = {name: torch.stack([u.weights[name] for u in task.updates]) for name in task.weights}
        device = next(iter(trained.values())).device
        logits = participant_shares(task.updates, weighting).log().to(device).requires_grad_()
        log_scale = torch.zeros((), dtype=torch.float64, device=device, requires_grad=True)
        buffers = {n: b.clone() for n, b in average_buffers(task.updates, weighting, task.buffers).items()}
        optimiser = torch.optim.Adam([logits, log_scale], lr=params.lr, betas=(0.5, 0.999))
        schedule = torch.optim.lr_scheduler.StepLR(optimiser, HALVED_EVERY, 0.5)
        table = batch_table(len(data.inputs), params.epochs, params.batch_size, task.generator("weights of the mean"))
        a_epoch = len(table) // params.epochs
        for number, index in enumerate(table, 1):
            tensors = {**mixed(trained, logits, log_scale), **buffers}
            outputs = task.model.forward(tensors, data.inputs.read(index), True).logits
            optimiser.zero_grad(set_to_none=True)
            mean_cross_entropy(outputs, data.labels[index.to(data.labels.device)].to(outputs.device)).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            if number % a_epoch == 0:
                schedule.step()
        with torch.no_grad():
            weights = mixed(trained, logits, log_scale)
        if not all(torch.isfinite(value).all() for value in weights.values()):
            raise diverged("the weights that fedlaw trains on the server are no longer finite; lower fedlaw.lr.")
        task.metrics["fedlaw_gamma"] = float(log_scale.detach().exp())
        return GlobalModel(weights, buffers)

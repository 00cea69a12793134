"""FedAvg + tau-norm - Kang, Xie, Rohrbach, Yan, Gordo, Feng, Kalantidis, "Decoupling Representation and Classifier for
Long-Tailed Recognition", ICLR 2020; as a federated baseline in CReFF (IJCAI 2022) and CLIP2FL (AAAI 2024).

Clients and server train as under FedAvg. At every evaluation the rows w_c of the global linear classifier, which grow
with the samples of their class, are brought nearer to one length; z are the features:
    w̃_c = w_c / ‖w_c‖₂^τ,   scores = w̃ z

Answers: evaluate. Needs a model with a linear head (`Model.head`). Stacks with methods that leave the prediction to the
default. Nothing that is trained or sent changes: the weights are FedAvg's bit for bit, whatever τ.
Left open / contradicted: the released code drops the bias (default); `use_bias=true` adds it, as it is. τ = 0 with the
bias is FedAvg. CReFF and CLIP2FL give neither τ nor the fate of the bias, and their row lies 2 to 8 points below
FedAvg's, which no validated τ could: a weak target. Default τ = 1, all rows of one length. Kang et al. choose τ on
validation data (tune it with a validation split; on the test set it is leakage), and their script prints the curve from
0 to 2. A row of zeros stays one. A client's own model, fine-tuned after the last round, keeps its head as it was tuned:
it is not the server's, and is to fit the client's own classes. Where clients keep other tensors private, their
own predictions are with the re-scaled global head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fedbench.api import EvaluationTask, Method, Predictions, hookimpl, hyper
from fedbench.toolkit.fedavg import largest_logit


@dataclass(frozen=True, kw_only=True)
class TauNormParams:
    """Hyper-parameters of tau-norm."""

    tau: float = hyper(
        1.0,
        symbol="τ",
        low=0.0,
        high=2.0,
        neutral=0.0,
        search=(0.0, 1.5),
        source="released code tries 0 to 2; CReFF gives none, 1 makes all rows one length",
    )
    use_bias: bool = hyper(False, symbol="b", neutral=True, source="released code drops the bias")


def normalised_rows(weight: Tensor, tau: float) -> Tensor:
    """w_c / ‖w_c‖^τ for every row of ``weight`` (C, d); a row of zeros stays as it is."""
    lengths = vector_norm(weight, dim=1, keepdim=True)
    return weight / torch.where(lengths > 0, lengths, 1.0).pow(tau)


class TauNorm(Method[TauNormParams]):
    """FedAvg, evaluated with a normalised classifier."""

    name = "tau-norm"
    citation = "Kang et al., Decoupling Representation and Classifier, ICLR 2020"
    requires = ("linear_head",)

    @hookimpl
    def evaluate(self, task: EvaluationTask) -> Predictions:
        """The largest score of the re-scaled global classifier; a client's fine-tuned model keeps its own."""
        head = task.model.linear_head
        if task.client is not None:
            return largest_logit(task)
        bias = task.weights[head.bias]
        changed = {
            head.weight: normalised_rows(task.weights[head.weight], self.params.tau),
            head.bias: bias if self.params.use_bias else torch.zeros_like(bias),
        }
        return largest_logit(replace(task, weights={**task.weights, **changed}))

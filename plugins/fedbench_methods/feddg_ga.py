"""FedDG-GA - Zhang, Xu, Yao, Wang, "Federated Domain Generalization with Generalization Adjustment", CVPR 2023.

The server weights clients by a_k, 1/N at first. After a round, the generalization gap of client k is by how much the
mean x does worse on its data than the model y_k that it had trained:
    G_k = L_k(x) − L_k(y_k),   d = (1 − (t − 1)/T) d₀ / N
    a_k ← a_k + d (G_k − Ḡ) / max_j |G_j − Ḡ|,  clipped to [0, 1], and a ← a / Σ_j a_j
A client whose data the mean serves worse counts more in the next round. Only clients that trained in the round have a
gap; a cohort's weights are its a_k, divided by their sum.

Answers: start, survey, report, reported, after_training. Wraps: aggregate, of whose answer it weights the clients.
Stacks with any learner that is trained on labels (prompts, heads, whole networks), with methods that change losses, and
with server steps. d₀ = 0 averages clients alike.
Left open / contradicted: as told of the paper, gaps are centred by their mean Ḡ. The released code does not centre, so
that all a_k rise or fall together before they are scaled (`centred=false`); there d₀/3 hard-codes three source domains,
which is d₀/N here, and equal gaps of zero divide by zero, which leave a as it is here. Its gaps are of accuracies on
validation data by default (`metric=accuracy`, with the sign turned); clients here have training data alone, on which
losses say more. In the code t starts one lower.
Cost: one float up after training, and one before the next round, with the model down to those that do not train in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.wrapping import Aggregate, Aggregated
from fedbench_methods.shared.reweighting import loss_and_accuracy, reweighted

FITTED = "feddg-ga.fitted"
"""What a client sends of the model it has trained."""


@dataclass(frozen=True, kw_only=True)
class FedDGGAParams:
    """Hyper-parameters of FedDG-GA."""

    step: float = fb.hyper(0.2, symbol="d₀", low=0.01, high=1.0, log=True, off=0.0, source="released code: 0.2")
    metric: Literal["loss", "accuracy"] = fb.hyper(
        "loss", symbol="G", source="loss: the definition; accuracy: released code's default"
    )
    centred: bool = fb.hyper(True, symbol="Ḡ", source="true: the paper; false: released code")


def adjusted(weights: Tensor, gaps: Tensor, step: float, centred: bool) -> Tensor:
    """a (N,) after a round, from a before it, the clients' ``gaps`` (N,), NaN where there is none, and d."""
    known = ~gaps.isnan()
    if not bool(known.any()):
        return weights
    apart = torch.where(known, gaps - (gaps[known].mean() if centred else 0.0), 0.0)
    largest = apart.abs().max()
    if largest == 0:
        return weights
    moved = (weights + step * apart / largest).clamp(0, 1)
    return moved / moved.sum() if moved.sum() > 0 else weights


class FedDGGA(fb.Method[FedDGGAParams]):
    """Weights clients by how much worse the mean serves them than their own models."""

    name = "feddg-ga"
    citation = "Zhang et al., Federated Domain Generalization with Generalization Adjustment, CVPR 2023"
    role = "aggregation"
    requires = ("labels", "global_model", "weighed_clients", "own_updates")

    @fb.hookimpl
    def start(self, task: fb.StartTask) -> None:
        """a_k = 1/N."""
        count = len(task.clients)
        weights = torch.full((count,), 1 / count, dtype=torch.float64)
        task.state[self.name] = self._kept(weights)

    @fb.hookimpl
    def after_training(self, task: fb.ClientTask, update: fb.Update) -> fb.Tensors:
        """L_k(y_k), or the accuracy with its sign turned."""
        return {FITTED: self._measured(task, update.weights, update.buffers)} if self.params.step else {}

    @fb.hookimpl
    def survey(self, round: int, spec: fb.RunSpec, state: Mapping[str, fb.Tensors]) -> str:
        """Everyone, before every round but the first."""
        return "everyone" if self.params.step and 1 < round <= spec.training.rounds else "nobody"

    @fb.hookimpl
    def report(self, task: fb.ClientTask) -> fb.Tensors:
        """L_k(x)."""
        return {"feddg-ga.received": self._measured(task, task.received, task.buffers)}

    @fb.hookimpl
    def reported(self, task: fb.ReportedTask) -> None:
        """The weights by the gaps of the round before; d falls over the run."""
        kept, training = self._before(task.state), task.spec.training
        gaps = torch.full_like(kept["weights"], torch.nan)
        for client, report in task.reports.items():
            if kept["trained"][client]:
                gaps[client] = report["feddg-ga.received"].double() - kept["fitted"][client]
        # gaps are of round t = task.round - 1
        step = self.params.step / len(gaps) * (1 - (task.round - 2) / training.rounds)
        weights = adjusted(kept["weights"], gaps, step, self.params.centred)
        task.state[self.name] = self._kept(weights)

    @fb.wrapper
    def aggregate(self, task: fb.AggregationTask, rest: Aggregate) -> Aggregated:
        """The stack's mean by a_k; the clients' own losses are kept for the gaps."""
        kept, clients = self._before(task.state), [update.client for update in task.updates]
        if self.params.step:
            fitted = self._kept(kept["weights"])
            fitted["fitted"][clients] = torch.stack([update.payload[FITTED].double().cpu() for update in task.updates])
            fitted["trained"][clients] = True
            task.state[self.name] = fitted
        weights = kept["weights"][clients]
        return reweighted(task, weights if bool(weights.sum() > 0) else torch.ones_like(weights), rest)

    def _before(self, state: dict[str, fb.Tensors]) -> fb.Tensors:
        # a state that was saved comes back on the run's device
        return {name: tensor.cpu() for name, tensor in state[self.name].items()}

    @staticmethod
    def _kept(weights: Tensor) -> fb.Tensors:
        """a (N,), and room for the losses of models that clients have trained, and which of them have."""
        return {
            "weights": weights,
            "fitted": torch.zeros_like(weights),
            "trained": torch.zeros(len(weights), dtype=torch.bool),
        }

    def _measured(self, task: fb.ClientTask, weights: fb.Tensors, buffers: fb.Tensors) -> Tensor:
        loss, accuracy = loss_and_accuracy(task, weights, buffers)
        return torch.tensor(loss if self.params.metric == "loss" else -accuracy)

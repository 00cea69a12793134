"""FedAvg - McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017.

Each client of the cohort runs E epochs of minibatch SGD on its own loss from the received weights w^t (Alg. 1,
ClientUpdate); the server takes  w^{t+1} = sum_k (n_k / sum_j n_j) w_k  over the participants (Alg. 1).

These are also the harness's own answers to every hook, registered like any other plugin, after all methods. The maths
stands in plain functions, so that a method that wants the default for some rounds calls it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedbench.core.errors import MethodFault
from fedbench.core.federation import Federation
from fedbench.core.method.base import Method, NoParams
from fedbench.core.method.hooks import default_hookimpl
from fedbench.core.method.tasks import (
    AggregationTask,
    BroadcastTask,
    ClientTask,
    EvaluationTask,
    LabelTask,
    LocalStep,
    ModelSetup,
)
from fedbench.core.spec import RunSpec
from fedbench.core.types import Broadcast, GlobalModel, Model, Predictions, StepGradients, Tensors, Update
from fedbench.models.heads import default_model
from fedbench.toolkit.local_training import local_sgd, loss_gradients, summed_loss
from fedbench.toolkit.losses import mean_cross_entropy

EVALUATION_BATCH = 500
MOST_SCORES = 2**26
"""Logits are kept up to this number, samples times classes; 256 MB of them."""
AVERAGED_AT_ONCE = 2**16


NEEDS_LABELS = (
    "this scenario hides the labels (labels=hidden), and the default loss is cross-entropy on labels; choose a method "
    "that learns without labels, stack it with one that gives labels (pseudo-labels), or set scenario.labels=visible."
)


def cross_entropy(step: LocalStep) -> Tensor:
    """Mean cross-entropy of the batch. Raises FedbenchError where the scenario hides the labels."""
    return mean_cross_entropy(step.outputs.logits, step.labels)


def weighted_mean(values: list[Tensor], shares: Tensor) -> Tensor:
    """sum_k shares_k * values_k, in float64: equal values come back bit for bit. ``shares`` (m,) sum to one.

    In parts that stay in a core's cache: 0.13 of the time of whole tensors, for ten of two million floats.
    """
    parts = zip(*(torch.split(value.flatten(), AVERAGED_AT_ONCE) for value in values), strict=True)
    means = []
    for part in parts:
        total = torch.zeros_like(part[0], dtype=torch.float64)
        for share, value in zip(shares.tolist(), part, strict=True):
            total.add_(value, alpha=share)
        means.append(total.to(part[0].dtype))
    return torch.cat(means).view(values[0].shape)


def mean_over_clients(values: Tensor, shares: Tensor) -> Tensor:
    """Σ p_k v_k of (m,) float64, a scalar; equal values come back bit for bit."""
    return values[0] + (shares * (values - values[0])).sum()


def participant_shares(updates: tuple[Update, ...], weighting: str) -> Tensor:
    """p_k over the participants, (m,) float64: n_k / sum_j n_j, or 1/m under ``weighting="uniform"``."""
    sizes = torch.tensor([u.num_examples if weighting == "samples" else 1 for u in updates], dtype=torch.float64)
    return sizes / sizes.sum()


def average(task: AggregationTask, weighting: str | None = None) -> Tensors:
    """The mean of the clients' weights over the participants (Alg. 1, server); by default weighted as the run says."""
    shares = participant_shares(task.updates, weighting or task.spec.training.weighting)
    return {name: weighted_mean([u.weights[name] for u in task.updates], shares) for name in task.weights}


def average_buffers(updates: tuple[Update, ...], weighting: str, received: Tensors) -> Tensors:
    """Running statistics averaged like the weights; counters (integers) are copied from the first client.

    Statistics that clients were not sent are not returned by them and stay as they were.
    """
    shares = participant_shares(updates, weighting)
    averaged = {}
    for name, old in received.items():
        if any(name not in u.buffers for u in updates):
            averaged[name] = old
            continue
        values = [u.buffers[name] for u in updates]
        if all(value is old for value in values):
            averaged[name] = old
            continue
        averaged[name] = weighted_mean(values, shares) if old.is_floating_point() else values[0]
    return averaged


def mean_model(task: AggregationTask, weighting: str) -> GlobalModel:
    """The mean of the participants' weights and running statistics alike: by ``samples``, or ``uniform``."""
    return GlobalModel(average(task, weighting), average_buffers(task.updates, weighting, task.buffers))


def largest_logit(task: EvaluationTask) -> Predictions:
    """argmax over the logits of the global model and, where tensors are private, of the requested own models."""
    requested = task.clients if task.private else ()
    own = {client: predicted_classes(task, *task.own_model(client)) for client in requested}
    return _global_answers(task, task.weights, own)


def personal_predictions(task: EvaluationTask, instead: Tensors) -> Predictions:
    """`largest_logit` for a method whose global model has the tensors ``instead``, by name, in place of private
    weights.

    The requested own models have the client's weights; a fine-tuned model is evaluated as it is.
    """
    if task.client is not None:
        return largest_logit(task)
    own = {client: predicted_classes(task, *task.own_model(client)) for client in task.clients}
    return _global_answers(task, {**task.weights, **instead}, own)


def predict_own(task: EvaluationTask, predict: Callable[[int, Tensors, Tensors], Tensor]) -> Predictions:
    """Predictions of a method without a global model: classes (n,) by ``predict(client, weights, buffers)``.

    They are those of the client whose model was fine-tuned, else those of every requested client's own model.
    """
    if task.client is not None:
        return Predictions(predict(task.client, task.weights, task.buffers))
    return Predictions(None, {client: predict(client, *task.own_model(client)) for client in task.clients})


@torch.no_grad()
def _global_answers(task: EvaluationTask, weights: Tensors, own: Mapping[int, Tensor]) -> Predictions:
    """The global model's classes and, up to `MOST_SCORES`, its logits."""
    if len(task.inputs) * task.num_classes > MOST_SCORES:
        return Predictions(predicted_classes(task, weights, task.buffers), own)
    batches = list(_logits(task, {**weights, **task.buffers}))
    labels = torch.cat([logits.argmax(1).cpu() for logits in batches])
    return Predictions(labels, own, torch.cat([logits.float().cpu() for logits in batches]))


def _logits(task: EvaluationTask, tensors: Tensors) -> Iterator[Tensor]:
    for chunk in torch.split(torch.arange(len(task.inputs)), EVALUATION_BATCH):
        yield task.model.forward(tensors, task.inputs.read(chunk), False).logits


@torch.no_grad()
def predicted_classes(task: EvaluationTask, weights: Tensors, buffers: Tensors) -> Tensor:
    """argmax over the logits that these tensors give for the task's inputs, (n,) int64, in batches."""
    return torch.cat([logits.argmax(1).cpu() for logits in _logits(task, {**weights, **buffers})])


class FedAvg(Method[NoParams]):
    """Weighted averaging of local SGD; also the default answer to every hook."""

    name = "fedavg"
    citation = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"
    role = "learner"

    def __init__(self, params: NoParams) -> None:
        super().__init__(params)
        # the hooks that a method of the run owns: reaching one here is a bug
        self.replaced: Mapping[str, str] = {}

    def _refuse_if_replaced(self, hook: str) -> None:
        # A method that forgets to return would otherwise run as FedAvg, silently.
        if hook in self.replaced:
            raise MethodFault(
                f"{self.replaced[hook]} answers the hook {hook} but returned None; return a value, or call the default "
                "in fedbench.toolkit.fedavg by name."
            )

    @default_hookimpl
    def federate(self, federation: Federation, spec: RunSpec) -> Federation:
        """The scenario's own federation, unchanged."""
        self._refuse_if_replaced("federate")
        return federation

    @default_hookimpl
    def label(self, task: LabelTask) -> Tensor | None:
        """None: clients without labels stay so."""
        return None

    @default_hookimpl
    def relabel(self, task: ClientTask) -> Tensor | None:
        """None: labels stay as they are."""
        return None

    @default_hookimpl
    def build_model(self, setup: ModelSetup) -> Model:
        """The whole network, or a text-initialised linear head on frozen features."""
        self._refuse_if_replaced("build_model")
        return default_model(setup)

    @default_hookimpl
    def survey(self, round: int, spec: RunSpec, state: Mapping[str, Tensors]) -> str:
        """Nobody is asked to report."""
        self._refuse_if_replaced("survey")
        return "nobody"

    @default_hookimpl
    def exchanges(self, round: int, spec: RunSpec, state: Mapping[str, Tensors]) -> int:
        """One exchange in every round."""
        self._refuse_if_replaced("exchanges")
        return 1

    @default_hookimpl
    def turns(self, clients: tuple[int, ...], round: int, spec: RunSpec) -> Sequence[int] | None:
        """None: all train from what the server sends."""
        return None

    @default_hookimpl
    def broadcast(self, task: BroadcastTask) -> Broadcast:
        """The global weights, for every client."""
        self._refuse_if_replaced("broadcast")
        return Broadcast(task.weights)

    @default_hookimpl
    def local_train(self, task: ClientTask) -> Update:
        """E epochs of minibatch steps (Alg. 1, ClientUpdate)."""
        self._refuse_if_replaced("local_train")
        return local_sgd(task)

    @default_hookimpl
    def local_gradients(self, step: LocalStep) -> StepGradients:
        """The gradients of the local objective."""
        self._refuse_if_replaced("local_gradients")
        return loss_gradients(step)

    @default_hookimpl
    def local_objective(self, step: LocalStep) -> Tensor:
        """The local loss and all terms."""
        self._refuse_if_replaced("local_objective")
        return summed_loss(step)

    @default_hookimpl
    def local_loss(self, step: LocalStep) -> Tensor:
        """Mean cross-entropy of the batch."""
        self._refuse_if_replaced("local_loss")
        return cross_entropy(step)

    @default_hookimpl
    def upload(self, task: ClientTask, update: Update) -> Update:
        """The update as it is."""
        self._refuse_if_replaced("upload")
        return update

    @default_hookimpl
    def aggregate(self, task: AggregationTask) -> Tensors:
        """The mean weighted by num_examples (Alg. 1, server)."""
        self._refuse_if_replaced("aggregate")
        return average(task)

    @default_hookimpl
    def evaluate(self, task: EvaluationTask) -> Predictions:
        """The largest logit of the global model."""
        self._refuse_if_replaced("evaluate")
        return largest_logit(task)

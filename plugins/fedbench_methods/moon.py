"""MOON - Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021.

Every local step pulls the representation z of an image towards the received global model's and away from that of the
client's own model of its last participation:
    l_con = −log [exp(cos(z, z_glob)/τ) / (exp(cos(z, z_glob)/τ) + exp(cos(z, z_prev)/τ))]      (Eq. 3)
    l = l_sup + μ l_con                                                                          (Eq. 4)
z_glob and z_prev come from frozen networks in eval mode (running statistics).

Answers: loss_terms, after_training (keeps the trained model with the client, sends nothing). Stacks with any method
that does not replace local_train; z is that method's `features`, for instance the unit embedding of `fedglcl`.
A client without an earlier model adds nothing, as in the first round of the released code (which gives clients that
were not drawn in it another random network: not done here). Starting from the received model instead would have the
same gradient, zero. The paper's network has a projection head d->d, ReLU, d->256 before its classifier: write
backbone=resnet50?projector=256&projector_layers=2, and give FedAvg the same backbone, or the two differ in more than
the loss. A head over frozen features (CLIP with tune=head) is refused: z would not depend on what is trained. Paper
lr 0.01 and decay 1e-5 hold for all its methods, so there is no recipe; the code's flags default to μ = 1, and the paper
chose 5 on CIFAR-10, 1 on CIFAR-100 and Tiny-ImageNet.
A client whose update was lost keeps the model it trained: z_prev is its own last one, and no server has a copy.
Cost: three forward passes a step, and one copy of weights and running statistics a client, saved with the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import softplus

from fedbench.api import ClientTask, LocalStep, Method, Tensors, Update, hookimpl, hyper
from fedbench.models.text.classifier import unit

WEIGHTS, BUFFERS = "weights/", "buffers/"


@dataclass(frozen=True, kw_only=True)
class MoonParams:
    """Hyper-parameters of MOON."""

    mu: float = hyper(
        1.0, symbol="μ", low=1e-3, high=10.0, log=True, neutral=0.0, source="Eq. 4; released code, it tries .001 to 10"
    )
    temperature: float = hyper(0.5, symbol="τ", low=0.1, high=1.0, log=True, needs="mu", source="Eq. 3; released code")


def model_contrast(now: Tensor, received: Tensor, previous: Tensor, temperature: float) -> Tensor:
    """l_con (Eq. 3) from z, z_glob and z_prev (batch, d), the mean over the batch.

    As log(1 + exp((cos(z, z_prev) − cos(z, z_glob)) / τ)), which is the same and does not overflow. The frozen unit
    vectors are subtracted first, so that where they are equal the gradient is zero to the last bit.
    """
    away = (unit(now) * (unit(previous) - unit(received))).sum(dim=1)
    return softplus(away / temperature).mean()


def kept_model(weights: Tensors, buffers: Tensors) -> Tensors:
    """One mapping of both, for the client's state."""
    return {
        **{WEIGHTS + name: tensor for name, tensor in weights.items()},
        **{BUFFERS + name: tensor for name, tensor in buffers.items()},
    }


def previous_model(kept: Tensors) -> tuple[Tensors, Tensors]:
    """Weights and buffers again, from what ``kept_model`` made of them."""
    return _with_prefix(kept, WEIGHTS), _with_prefix(kept, BUFFERS)


def _with_prefix(kept: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in kept.items() if name.startswith(prefix)}


class MOON(Method[MoonParams]):
    """Contrasts the local, the global and the previous model's features."""

    name = "moon"
    citation = "Li, He, Song, Model-Contrastive Federated Learning, CVPR 2021"
    requires: tuple[str, ...] = ("trained_features", "sent_steps", "global_model")
    keeps_lost_training = True

    def __init__(self, params: MoonParams) -> None:
        super().__init__(params)
        if not params.mu:
            self.requires = ()

    @hookimpl
    def loss_terms(self, step: LocalStep) -> Tensor | None:
        """μ l_con (Eq. 4); nothing in a client's first participation, nor for a model that it keeps."""
        kept = step.task.state.get(self.name)
        if kept is None or step.is_own:
            return None
        previous = step.outputs_of(*previous_model(kept)).features
        contrast = model_contrast(
            step.outputs.features, step.received_outputs.features, previous, self.params.temperature
        )
        return self.params.mu * contrast

    @hookimpl
    def after_training(self, task: ClientTask, update: Update) -> None:
        """Keep the trained weights and running statistics for the client's next participation."""
        task.state[self.name] = kept_model(update.weights, update.buffers)

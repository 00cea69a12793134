"""FedFA - Zhou and Konukoglu, "FedFA: Federated Feature Augmentation", ICLR 2023.

In training, the feature maps X (B, c, h, w) at the end of every convolution block get other channel statistics, with
probability p a block and step. With μ, σ (B, c) the mean and deviation of each sample's channels:
    V = variance of μ (of σ) over the samples of the batch, (c,)
    S = variance over the clients of their running means of μ (of σ), (c,)
    w = 1 / (1 + 1/S),   G = c w / Σ w
    β ~ N(μ, (G_μ + 1) V_μ),   γ ~ N(σ, (G_σ + 1) V_σ),   X' = γ (X - μ) / σ + β
A client's running means of μ and σ have the factor α and move when the layer fires. The server takes the plain mean of
all entries, running statistics included, and sends S with them. Evaluated is the global model as it is.

Answers: build_model, start, broadcast, local_loss, aggregate. Methods that add loss terms (fedprox, moon) read the
outputs of the same augmented pass. Needs a backbone with convolution blocks, trained whole.
`weighting` is of weights and running statistics alike: with p = 0 it is FedAvg under weighting=uniform, bit for bit.
Left open / contradicted (until S is known, G is 1):
- S is one variance over clients and channels in the code, so that G = 1 everywhere (`sharing=as_released`).
- Running means start at 0 and 1 in every round of the paper; the code goes on from the clients' average, as here.
- The code divides variances by n - 1; here it is n: a batch, a map or a cohort of one has the variance 0.
- As in the code, 1e-6 is added to variances, gradients pass V, blocks end behind pooling; but optimisers are rebuilt.
Cost: 4 c floats a block more are sent down and 2 c up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.api import FedbenchError, hookimpl, hyper
from fedbench.models.cnn.nets import block_channels, with_changed_blocks
from fedbench.models.heads import full_model
from fedbench.toolkit.fedavg import cross_entropy, mean_model

EPSILON = 1e-6
STATISTICS = ("mean", "std")


@dataclass(frozen=True, kw_only=True)
class FedFAParams:
    """Hyper-parameters of FedFA."""

    probability: float = hyper(0.5, symbol="p", low=0.1, high=1.0, off=0.0, source="paper and released code; 0: FedAvg")
    decay: float = hyper(0.99, symbol="α", low=0.0, high=0.999, search=False, needs="probability", source="paper")
    sharing: Literal["per_channel", "as_released"] = hyper("per_channel", symbol="S", source="paper; the code: G = 1")
    weighting: Literal["uniform", "samples"] = hyper("uniform", symbol="1/M", source="paper; samples: as FedAvg")


def tensor_name(kind: str, statistic: str, block: int) -> str:
    """How a tensor of this method is called: ``kind`` is running, shared (S) or noise."""
    return f"fedfa.{kind}.{statistic}.{block}"


def channel_statistics(features: Tensor) -> tuple[Tensor, Tensor]:
    """μ and σ, (B, c) each, of the channels of every sample of ``features`` (B, c, h, w)."""
    variance, mean = torch.var_mean(features, dim=(2, 3), correction=0)
    return mean, (variance + EPSILON).sqrt()


def channel_weights(shared: Tensor) -> Tensor:
    """G = c w / Σ w with w = 1 / (1 + 1/S), from S (c,): (c,), 1 on average."""
    weights = 1 / (1 + 1 / (shared + EPSILON))
    return weights / weights.mean()


def resampled(values: Tensor, shared: Tensor, noise: Tensor) -> Tensor:
    """A draw from N(values, (G + 1) V), (B, c): of μ or σ ``values`` (B, c), S (c,), standard ``noise`` (B, c)."""
    batch_variance = values.var(dim=0, correction=0) + EPSILON
    return values + noise * ((channel_weights(shared) + 1) * batch_variance).sqrt()


def augmented(block: int, features: Tensor, tensors: fb.Tensors, decay: float) -> Tensor:
    """γ (X - μ) / σ + β, (B, c, h, w), where there is noise for the block, else X itself; moves the running means."""
    if tensor_name("noise", "mean", block) not in tensors:
        return features

    def drawn(statistic: str, values: Tensor) -> Tensor:
        kinds = ("running", "shared", "noise")
        running, shared, noise = (tensors[tensor_name(kind, statistic, block)] for kind in kinds)
        with torch.no_grad():
            running.mul_(decay).add_(values.mean(dim=0), alpha=1 - decay)
        return resampled(values, shared, noise)[:, :, None, None]

    # in a bfloat16 step too: a variance of half-precision means would be mostly rounding
    exact = features.float()
    mean, std = channel_statistics(exact)
    beta, gamma = drawn("mean", mean), drawn("std", std)
    return (gamma * (exact - mean[:, :, None, None]) / std[:, :, None, None] + beta).to(features.dtype)


def draw_noise(channels: Sequence[int], batch: int, probability: float, generator: torch.Generator) -> fb.Tensors:
    """Standard normal draws (batch, c) for μ and σ of the blocks that fire, each with ``probability``."""
    noise = {}
    for block, width in enumerate(channels):
        if torch.rand((), generator=generator) < probability:
            for statistic in STATISTICS:
                noise[tensor_name("noise", statistic, block)] = torch.randn(batch, width, generator=generator)
    return noise


def variance_over_clients(running: Sequence[Tensor], sharing: str) -> Tensor:
    """S (c,) from the clients' running means (c,), by channel, or one variance over clients and channels for all."""
    stacked = torch.stack(list(running))
    if sharing == "as_released":
        return stacked.var(correction=0).repeat(stacked.shape[1])
    return stacked.var(dim=0, correction=0)


class FedFA(fb.Method[FedFAParams]):
    """Augments feature statistics by what clients share."""

    name = "fedfa"
    citation = "Zhou and Konukoglu, FedFA: Federated Feature Augmentation, ICLR 2023"
    prevents: tuple[str, ...] = ("weighed_clients",)
    reads = ("tune",)
    requires = ("labels", "whole_model")

    def __init__(self, params: FedFAParams) -> None:
        super().__init__(params)
        self.prevents = () if params.weighting == "samples" else self.prevents

    @hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """The whole network, with augmentation in training and running statistics for every block end."""
        channels = block_channels(setup.backbone.module)
        if not channels or not setup.tunes_everything:
            raise FedbenchError(
                f"fedfa augments the feature maps of a trained network's convolution blocks, which the backbone "
                f"{setup.spec.backbone!r} with tune={setup.spec.tune} has not; choose a CNN, such as backbone=resnet8."
            )
        model = with_changed_blocks(full_model(setup), partial(augmented, decay=self.params.decay))
        running = {}
        for block, width in enumerate(channels):
            running[tensor_name("running", "mean", block)] = torch.zeros(width)
            running[tensor_name("running", "std", block)] = torch.ones(width)
        return replace(model, buffers={**model.buffers, **running})

    @hookimpl
    def start(self, task: fb.StartTask) -> None:
        """S is the same for all channels until clients have sent their statistics."""
        task.state[self.name] = _shared(task.model, lambda name: torch.ones_like(task.model.buffers[name]))

    @hookimpl
    def broadcast(self, task: fb.BroadcastTask) -> fb.Broadcast:
        """The global weights, and S of every block."""
        return fb.Broadcast(task.weights, dict(task.state[self.name]))

    @hookimpl
    def local_loss(self, step: fb.LocalStep) -> Tensor:
        """Cross-entropy of a pass with new draws."""
        task, inputs = step.task, step.batch.inputs
        generator = step.generator("feature-augmentation")
        channels = [len(step.buffers[name]) for name in _running_names(step.model, "mean")]
        noise = draw_noise(channels, len(inputs), self.params.probability, generator)
        step.outputs_with({name: tensor.to(inputs.device) for name, tensor in {**task.payload, **noise}.items()})
        return cross_entropy(step)

    @hookimpl
    def aggregate(self, task: fb.AggregationTask) -> fb.GlobalModel:
        """The plain mean of weights and running statistics; S from the clients' running statistics."""
        updates, sharing = task.updates, self.params.sharing
        task.state[self.name] = _shared(
            task.model, lambda name: variance_over_clients([update.buffers[name] for update in updates], sharing)
        )
        return mean_model(task, self.params.weighting)


def _running_names(model: fb.Model, statistic: str) -> list[str]:
    """The names of the running ``statistic`` of all blocks, in their order."""
    return [name for name in model.buffers if name.startswith(f"fedfa.running.{statistic}.")]


def _shared(model: fb.Model, of: Callable[[str], Tensor]) -> fb.Tensors:
    """S of both statistics and all blocks, by name: ``of`` the name of the block's running statistic."""
    names = [name for statistic in STATISTICS for name in _running_names(model, statistic)]
    return {name.replace("running", "shared"): of(name) for name in names}

"""FedCLIP - Lu, Hu, Wang, Xie, "FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning",
IEEE Data Eng. Bulletin 46(1), 2023; arXiv 2302.13485.

Only an attention adapter on the frozen image feature I is trained and sent:
    A = softmax(W2 tanh(W1 I + b1) + b2),   I* = A ⊙ I                      (attention adapter, section 3.3)
    Î = I*/|I*|,  T̂ = T/|T|,  Z = s Î T̂ᵀ ∈ R^{B×B},  targets 0..B-1          (Eqs. 29-31)
    L = ½ [CE(Z, targets) + CE(Zᵀ, targets)]                                  (Eq. 32)
    w ← Σ_i (n_i / Σ_j n_j) w_i                                               (Eq. 33)
T holds the text feature of each sample's own class; at test time the class with the largest cos(I*, T_k) is predicted.

Answers: build_model, local_loss. Stacks with methods that add loss terms or aggregate otherwise.
Paper against released code: the paper weights clients by n_i, the code uniformly (`weighting=uniform` of the run); the
paper names Adam without settings, the code's Adam (0.9, 0.98), ε 1e-6 and coupled decay 0.2 are the recipe here. Other
samples of a sample's own class count as negatives, in both; the loss therefore has a floor. Eq. 30 prints |I| under T
and Eq. 32 targets 0..B: typos. Adapter width: the code's d; `hidden=128` is the size CAPT compares with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, normalize

from fedbench.errors import FedbenchError
from fedbench.hookspecs import LocalStep, ModelSetup, hookimpl
from fedbench.hyper import hyper
from fedbench.models.heads import require_clip, scaled_logits
from fedbench.randomness import torch_generator
from fedbench.types import LabelledBatch, Model, Outputs, Tensors


@dataclass(frozen=True, kw_only=True)
class FedClipParams:
    """Hyper-parameters of FedCLIP."""

    hidden: int = hyper(
        0, symbol="h", low=0, high=4096, source="released code: h = d; CAPT's re-implementation uses 128; 0 means d"
    )


def attention(features: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
    """A = softmax(W2 tanh(W1 I + b1) + b2) over the feature axis: (batch, d) to (batch, d)."""
    inner = torch.tanh(linear(features, adapter["adapter.W1"], adapter["adapter.b1"]))
    return torch.softmax(linear(inner, adapter["adapter.W2"], adapter["adapter.b2"]), dim=1)


def adapted(features: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
    """Î, the unit vector of I* = A ⊙ I: (batch, d). I is the raw feature, not normalised before the gate."""
    return normalize(attention(features, adapter) * features, dim=-1)


def in_batch_loss(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """½ [CE(Z, 0..B-1) + CE(Zᵀ, 0..B-1)], Z = s Î T̂ᵀ, from unit ``images`` and ``texts`` (B, d) (Eqs. 31-32)."""
    similarity = scale * images @ texts.T
    targets = torch.arange(len(images), device=images.device)
    return 0.5 * (cross_entropy(similarity, targets) + cross_entropy(similarity.T, targets))


def initial_adapter(dim: int, hidden: int, seed: int) -> Tensors:
    """W1 (h, d), b1 (h,), W2 (d, h), b2 (d,), each uniform in ±1/√fan_in (torch's default for linear layers)."""
    generator = torch_generator(seed, "fedclip-adapter")
    adapter = {}
    for name, rows, columns in (("1", hidden, dim), ("2", dim, hidden)):
        bound = columns**-0.5
        adapter[f"adapter.W{name}"] = (2 * torch.rand(rows, columns, generator=generator) - 1) * bound
        adapter[f"adapter.b{name}"] = (2 * torch.rand(rows, generator=generator) - 1) * bound
    return adapter


class FedCLIP:
    """The attention adapter and its in-batch contrastive loss."""

    name: ClassVar[str] = "fedclip"
    citation: ClassVar[str] = "Lu et al., FedCLIP, IEEE Data Eng. Bulletin 46(1), 2023"
    Params: ClassVar[type] = FedClipParams
    recipe: ClassVar[Mapping[str, object]] = {
        "optimizer": "adam",
        "lr": 5e-5,
        "beta1": 0.9,
        "beta2": 0.98,
        "eps": 1e-6,
        "weight_decay": 0.2,
    }

    def __init__(self, params: FedClipParams) -> None:
        self.params = params

    @hookimpl
    def build_model(self, setup: ModelSetup) -> Model:
        """The adapter between frozen image features and the classes' text features (section 3.3)."""
        clip = require_clip(setup, self.name)
        text = clip.text_features(setup.classnames, setup.spec.templates).to(setup.spec.device)

        def forward(tensors: Mapping[str, Tensor], inputs: Tensor, training: bool) -> Outputs:
            features = adapted(inputs, tensors)
            return Outputs(scaled_logits(features, text, None, clip.logit_scale), features)

        return Model(
            weights=initial_adapter(clip.embed_dim, self.params.hidden or clip.embed_dim, setup.spec.seed),
            forward=forward,
            encoder=clip.image_encoder(),
            constants={"text": text, "scale": torch.tensor(clip.logit_scale)},
        )

    @hookimpl
    def local_loss(self, step: LocalStep) -> Tensor:
        """In-batch contrastive loss (Eq. 32) against the text of each sample's own class."""
        if not isinstance(step.batch, LabelledBatch):
            raise FedbenchError("fedclip needs labels; set scenario.labels=visible.")
        constants = step.model.constants
        return in_batch_loss(step.outputs.features, constants["text"][step.batch.labels], constants["scale"])

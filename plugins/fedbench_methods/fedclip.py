"""FedCLIP - Lu, Hu, Wang, Xie, "FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning",
IEEE Data Eng. Bulletin 46(1), 2023; arXiv 2302.13485.

Only an attention adapter on the frozen image feature I is trained and sent:
    A = softmax(W2 tanh(W1 I + b1) + b2),   I* = A ⊙ I                      (attention adapter, section 3.3)
    Î = I*/|I*|,  T̂ = T/|T|,  Z = s Î T̂ᵀ ∈ R^{B×B},  targets 0..B-1          (Eqs. 29-31)
    L = ½ [CE(Z, targets) + CE(Zᵀ, targets)]                                  (Eq. 32)
    w ← Σ_i (n_i / Σ_j n_j) w_i                                               (Eq. 33)
T holds the text feature of each sample's own class; at test time the class with the largest cos(I*, T_k) is predicted.
Figure 3's variants: `adapters=text` or `both` puts an adapter of the same shape on T, in the loss as at test time;
`encoders=trained` trains both towers as well. The loss of the baselines "CLIP FedAvg" and "CLIP FedProx" is not stated:
by FedCLIP's own they are `adapters=none encoders=trained`, by cross-entropy `fedavg` and `fedprox` with `tune=full`.
Fine-tuning after the last round is the run's `finetune_epochs`.

Answers: build_model, local_loss. Stacks with methods that add loss terms or aggregate otherwise.
Paper against released code, and left open:
- The paper weights clients by n_i, the code uniformly (`weighting=uniform` of the run).
- The paper names Adam without settings. The recipe is the code's: Adam (0.9, 0.98), ε 1e-6, coupled decay 0.2. It is
  the adapter's: whole towers want a smaller learning rate and decay.
- Samples of a sample's own class count as negatives in both; the loss therefore has a floor.
- Eq. 30 prints |I| under T and Eq. 32 targets 0..B: typos. Adapter width: the code's d; CAPT compares with 128.
- The code has no variants. The text adapter reads raw features, prompt by prompt before templates are averaged, so that
  uniform gates are zero-shot CLIP; "CLIP FedAvg" takes the same loss and trains all of CLIP, its logit scale too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy, linear, normalize

import fedbench.api as fb
from fedbench.api import FedbenchError, hookimpl, hyper
from fedbench.models.clip.backbone import ClipBackbone, Towers, class_vectors, fill_templates, tower_tensors
from fedbench.models.heads import clip_of
from fedbench.models.per_thread import per_thread

IMAGE, TEXT = "adapter.", "adapter.text."
"""Where the names of the adapters' weights begin."""
PREFIXES = {"image": (IMAGE,), "text": (TEXT,), "both": (IMAGE, TEXT), "none": ()}


@dataclass(frozen=True, kw_only=True)
class FedClipParams:
    """Hyper-parameters of FedCLIP."""

    hidden: int = hyper(0, symbol="h", low=0, high=4096, search=False, source="code: 0, which means d; CAPT: 128")
    adapters: Literal["image", "text", "both", "none"] = hyper("image", symbol="g", source="section 3.3; Figure 3(a)")
    encoders: Literal["frozen", "trained"] = hyper("frozen", symbol="f^I, f^T", source="section 3.3; Figure 3(b)")


@dataclass(frozen=True, eq=False)
class PairedOutputs(fb.Outputs):
    """Both sides of the comparison: ``features`` are Î (batch, d)."""

    texts: Tensor
    """T̂ of all classes, (C, d)."""
    scale: Tensor
    """s, a scalar."""


def attention(features: Tensor, adapter: fb.Tensors, prefix: str = IMAGE) -> Tensor:
    """A = softmax(W2 tanh(W1 I + b1) + b2) over the feature axis: (batch, d) to (batch, d)."""
    inner = torch.tanh(linear(features, adapter[f"{prefix}W1"], adapter[f"{prefix}b1"]))
    return torch.softmax(linear(inner, adapter[f"{prefix}W2"], adapter[f"{prefix}b2"]), dim=1)


def gated(features: Tensor, adapter: fb.Tensors, prefix: str = IMAGE) -> Tensor:
    """I* = A ⊙ I: (batch, d). I is the raw feature, not normalised before the gate."""
    return attention(features, adapter, prefix) * features


def in_batch_loss(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """½ [CE(Z, 0..B-1) + CE(Zᵀ, 0..B-1)], Z = s Î T̂ᵀ, from unit ``images`` and ``texts`` (B, d) (Eqs. 31-32)."""
    similarity = scale * images @ texts.T
    targets = torch.arange(len(images), device=images.device)
    return 0.5 * (cross_entropy(similarity, targets) + cross_entropy(similarity.T, targets))


def initial_adapter(dim: int, hidden: int, seed: int, prefix: str = IMAGE) -> fb.Tensors:
    """W1 (h, d), b1 (h,), W2 (d, h), b2 (d,), each uniform in ±1/√fan_in (torch's default for linear layers)."""
    generator = fb.torch_generator(seed, "fedclip-adapter" if prefix == IMAGE else "fedclip-text-adapter")
    adapter = {}
    for name, rows, columns in (("1", hidden, dim), ("2", dim, hidden)):
        bound = columns**-0.5
        adapter[f"{prefix}W{name}"] = (2 * torch.rand(rows, columns, generator=generator) - 1) * bound
        adapter[f"{prefix}b{name}"] = (2 * torch.rand(rows, generator=generator) - 1) * bound
    return adapter


class FedCLIP(fb.Method[FedClipParams]):
    """An attention adapter on frozen CLIP features; on texts, both, with trained encoders."""

    name = "fedclip"
    citation = "Lu et al., FedCLIP, IEEE Data Eng. Bulletin 46(1), 2023"
    recipe = {"optimizer": "adam", "lr": 5e-5, "beta1": 0.9, "beta2": 0.98, "eps": 1e-6, "weight_decay": 0.2}
    requires = ("labels", "clip")

    def __init__(self, params: FedClipParams) -> None:
        if params.adapters == "none" and params.encoders == "frozen":
            raise FedbenchError("fedclip has nothing to train; choose adapters, or encoders=trained, or run clip-zs.")
        super().__init__(params)

    @hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """Adapters between image features and the classes' text features (section 3.3), towers frozen or trained."""
        clip = clip_of(setup)
        dim, num_classes = clip.embed_dim, len(setup.classnames)
        adapters: fb.Tensors = {}
        for prefix in PREFIXES[self.params.adapters]:
            adapters |= initial_adapter(dim, self.params.hidden or dim, setup.spec.seed, prefix)
        texts = fill_templates(setup.classnames, setup.spec.templates)
        if self.params.encoders == "trained":
            return self._trained(clip, texts, num_classes, adapters)
        prompts, scale = clip.encode_text(texts).to(setup.spec.device), torch.tensor(clip.logit_scale)
        fixed = class_vectors(prompts, num_classes)
        adapt_text = TEXT in PREFIXES[self.params.adapters]

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
            vectors = self._class_texts(tensors, prompts, num_classes) if adapt_text else fixed
            return self._compare(tensors, inputs, vectors, scale)

        return fb.Model(weights=adapters, forward=forward, encoder=clip.image_encoder())

    def _trained(self, backbone: ClipBackbone, texts: list[str], num_classes: int, adapters: fb.Tensors) -> fb.Model:
        """The model whose weights are the adapters and all of CLIP, which reads images."""
        towers = Towers(backbone.module, backbone.text.truncated(backbone.tokenizer(texts)))
        weights, buffers = ({f"clip.{n}": t for n, t in part.items()} for part in tower_tensors(backbone.module))
        names, own_towers = (*weights, *buffers), per_thread(towers)

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
            own = own_towers()
            # the module is shared with the frozen encoders, which rely on eval mode
            own.train(training)
            try:
                images, prompts, scale = functional_call(own, {name: tensors[name] for name in names}, (inputs,))
            finally:
                own.eval()
            return self._compare(tensors, images, self._class_texts(tensors, prompts, num_classes), scale)

        return fb.Model({**adapters, **weights}, forward, buffers, transform=backbone.transform)

    def _class_texts(self, tensors: fb.Tensors, prompts: Tensor, num_classes: int) -> Tensor:
        """T̂ of all classes (C, d) from the raw features of all ``prompts`` (templates * C, d)."""
        adapt = TEXT in PREFIXES[self.params.adapters]
        return class_vectors(gated(prompts, tensors, TEXT) if adapt else prompts, num_classes)

    def _compare(self, tensors: fb.Tensors, images: Tensor, texts: Tensor, scale: Tensor) -> PairedOutputs:
        """s Î T̂ᵀ (batch, C) from raw features of ``images`` (batch, d) and unit vectors ``texts`` T̂ (C, d)."""
        adapt = IMAGE in PREFIXES[self.params.adapters]
        features = normalize(gated(images, tensors, IMAGE) if adapt else images, dim=-1)
        return PairedOutputs(scale * linear(features, texts), features, texts, scale)

    @hookimpl
    def local_loss(self, step: fb.LocalStep) -> Tensor:
        """In-batch contrastive loss (Eq. 32) against the text of each sample's own class."""
        paired = cast(PairedOutputs, step.outputs)
        return in_batch_loss(paired.features, paired.texts[step.labels], paired.scale)

"""CLIP-LoRA - Zanella and Ben Ayed, "Low-Rank Few-Shot Adaptation of Vision-Language Models", CVPR Workshops 2024;
arXiv 2405.18541.

Projections W (w, w) of every attention layer of both towers get a low-rank addition, CLIP itself is frozen:
    W' x = W x + γ B A x,   A (r, w) uniform, B (w, r) = 0,   γ = α / √r
    L = CE(s f_x·t_k, y),   f_x and t_k from the adapted towers, t_k of the run's templates
A and B are trained and sent, 2 r w floats a projection. Dropout acts on the input of the addition, in training only.

Answers: build_model, local_loss, aggregate. Stacks with methods that add loss terms.
Since B starts at zero, round 0 is zero-shot CLIP. How a federation averages is not the paper's: `lora_agg=factors`
averages A and B apart (mean(B) mean(A) is not mean(B A)); `freeze_A` draws A from the seed, trains and sends B alone,
so that the mean is exact (as `ffa-lora`); `product_svd` takes the best rank-r approximation of mean(B A) (as
`flexlora` with split=root). CAPT, whose table this is a row of, does not say. Methods of their own stack on it:
clip-lora+ffa-lora, +fedsa-lora, +rolora, +fedex-lora, +flora, +flexlora. A matrix R among the tensors of a pass, which
the last but one bring, is added as γ R x.
Paper against released code: γ = α/√r is the code's, α/r (`scaling=linear`) the usual one. The code's recipe (AdamW
2e-4, decay 1e-2) is the recipe here, without its cosine (`lr_schedule`). CAPT's SGD at 1e-3 hardly moves a B that
starts at zero. Queries, keys and values are adapted as in the code's defaults; `projections=qkvo` adds the output.
Class texts are encoded together, so what they begin with has one dropout mask for all; it is drawn on the run's
device. Images pass the tower in every step unless `encoders=text`. A ResNet has no such layers: `encoders=text` is
what it can do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

import fedbench.api as fb
from fedbench.api import hookimpl, hyper
from fedbench.models.clip.backbone import class_vectors, fill_templates
from fedbench.models.clip.blocks import Added
from fedbench.models.heads import TextOutputs, clip_of, scaled_logits
from fedbench.models.prompts.context import fixed_texts
from fedbench.models.prompts.image_tokens import encode_with_tokens, require_vision_transformer
from fedbench.toolkit.fedavg import average, cross_entropy, participant_shares
from fedbench.toolkit.low_rank import RESIDUAL, product_mean, sent_factors, uniform_factor

NOISE = "lora.noise"
"""The seed of a step's dropout, among the tensors of a training pass."""


@dataclass(frozen=True, kw_only=True)
class ClipLoraParams:
    """Hyper-parameters of CLIP-LoRA."""

    rank: int = hyper(2, symbol="r", low=1, high=64, search=(1, 16), source="paper and released code")
    alpha: float = hyper(1.0, symbol="α", low=0.1, high=64.0, log=True, search=False, source="released code")
    scaling: Literal["root", "linear"] = hyper("root", symbol="γ", source="released code: α/√r; linear: α/r")
    dropout: float = hyper(0.25, symbol="p", low=0.05, high=0.9, off=0.0, search=(0.05, 0.3), source="released code")
    projections: Literal["q", "v", "qv", "qkv", "qkvo"] = hyper("qkv", symbol="W", source="released code")
    encoders: Literal["both", "image", "text"] = hyper("both", symbol="f, g", source="released code")
    lora_agg: Literal["factors", "freeze_A", "product_svd"] = hyper(
        "factors", symbol="mean", source="not stated by CAPT"
    )


def low_rank(x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """γ B A x for states ``x`` (..., w), ``a`` A (r, w) and ``b`` B (w, r): (..., w)."""
    return scale * linear(linear(x, a), b)


def dropped(x: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Entries of ``x`` set to zero with ``probability``, the others divided by one minus it."""
    kept = torch.empty_like(x).bernoulli_(1 - probability, generator=generator)
    return x * kept / (1 - probability)


class ClipLoRA(fb.Method[ClipLoraParams]):
    """Low-rank additions to the attention of both towers."""

    name = "clip-lora"
    citation = "Zanella and Ben Ayed, Low-Rank Few-Shot Adaptation of VLMs, CVPR Workshops 2024"
    recipe = {"optimizer": "adamw", "lr": 2e-4, "weight_decay": 1e-2}
    requires = ("labels", "clip")

    @hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """A and B of every adapted projection of the towers chosen; what is not adapted is encoded once."""
        clip, chosen = clip_of(setup), self.params.encoders
        names, templates, scale = setup.classnames, setup.spec.templates, clip.logit_scale
        factors: fb.Tensors = {}
        visual = packed = None
        fixed = torch.empty(0)
        if chosen == "text":
            encoder = clip.image_encoder()
        else:
            what = "clip-lora adapts attention layers of the image tower"
            visual, encoder = require_vision_transformer(clip, what, "clip-lora.encoders=text"), None
            factors |= self._factors("image", visual.width, visual.depth, setup.spec.seed)
        if chosen == "image":
            fixed = clip.text_features(names, templates)
        else:
            packed = fixed_texts(clip, fill_templates(names, templates), "clip-lora adapts")
            factors |= self._factors("text", clip.text.width, len(packed.blocks), setup.spec.seed)
        frozen = self.params.lora_agg == "freeze_A"
        constants = {name: t.to(setup.spec.device) for name, t in factors.items() if frozen and name.endswith(".A")}

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
            additions = self._additions({**constants, **tensors}, inputs.device)
            texts = fixed
            if packed is not None:
                texts = class_vectors(packed.encode(added=lambda layer: additions("text", layer)), len(names))
            if visual is not None:
                inputs = encode_with_tokens(visual, inputs, added=lambda layer: additions("image", layer))
            features = normalize(inputs, dim=-1)
            return TextOutputs(scaled_logits(features, texts, None, scale), features, texts)

        weights = {name: tensor for name, tensor in factors.items() if name not in constants}
        transform = clip.transform if encoder is None else None
        return fb.Model(weights, forward, encoder=encoder, transform=transform, constants=constants)

    @hookimpl
    def local_loss(self, step: fb.LocalStep) -> Tensor:
        """Cross-entropy, of a pass with new dropout."""
        if self.params.dropout:
            seed = step.generator("lora dropout").initial_seed()
            step.outputs_with({NOISE: torch.tensor(seed)})
        return cross_entropy(step)

    @hookimpl
    def aggregate(self, task: fb.AggregationTask) -> fb.Tensors:
        """The means of A and B, or the factors of the mean of their products."""
        if self.params.lora_agg != "product_svd":
            return average(task)
        shares, means = participant_shares(task.updates, task.spec.training.weighting), {}
        for name in (name.removesuffix(".A") for name in task.weights if name.endswith(".A")):
            a, b = sent_factors(task.updates, name)
            means[f"{name}.A"], means[f"{name}.B"] = product_mean(a, b, shares.to(a[0]))
        return means

    def _factors(self, tower: str, width: int, depth: int, seed: int) -> fb.Tensors:
        """A, uniform in ±1/√w (Kaiming's with a = √5), and B = 0 of all layers of a tower."""
        rank = self.params.rank
        factors: fb.Tensors = {}
        for layer in range(depth):
            for projection in self.params.projections:
                name = f"lora.{tower}.{layer}.{projection}"
                a = uniform_factor(rank, width, fb.torch_generator(seed, name))
                factors |= {f"{name}.A": a, f"{name}.B": torch.zeros(width, rank)}
        return factors

    def _additions(self, tensors: fb.Tensors, device: torch.device) -> Callable[[str, int], Added]:
        """What the projections of a tower's layer get besides, in a pass with these tensors."""
        rank, noise = self.params.rank, tensors.get(NOISE)
        scale = self.params.alpha / (rank**0.5 if self.params.scaling == "root" else rank)
        generator = None if noise is None else torch.Generator(device).manual_seed(int(noise))

        def of_layer(tower: str, layer: int) -> Added:
            def added(projection: str, x: Tensor) -> Tensor | None:
                name = f"lora.{tower}.{layer}.{projection}"
                if projection not in self.params.projections:
                    return None
                dropped_x = x if generator is None else dropped(x, self.params.dropout, generator)
                addition = low_rank(dropped_x, tensors[f"{name}.A"], tensors[f"{name}.B"], scale)
                # merged into W, so dropout does not act on it
                residual = tensors.get(name + RESIDUAL)
                return addition if residual is None else addition + scale * linear(x, residual)

            return added

        return of_layer

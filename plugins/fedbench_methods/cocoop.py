"""CoCoOp + FedAvg - Zhou, Yang, Loy, Liu, "Conditional Prompt Learning for Vision-Language Models", CVPR 2022;
federated by FedAvg, as in the comparisons of FedTPG and CAPT.

Every image moves the context that it is classified with; CLIP is frozen:
    f_x = f(x) / |·|,   b(x) = W_b relu(W_a f_x + a) + c ∈ R^{d_t}         (meta-net, hidden width d / r)
    v_m(x) = v_m + b(x), m = 1..M,   t_k(x) = g([v(x); name_k]) / |·|
    L = CE(s f_x·t_k(x), y);   all weights ← Σ_i (n_i / Σ_j n_j) weights_i
Trained and sent: v (M, d_t) and the meta-net, M d_t + (d+1) d/r + (d/r+1) d_t floats: 35,360 for ViT-B/16, M = 4.

Answers: build_model. Everything else is FedAvg; stacks with methods that add loss terms or aggregate otherwise.
A step encodes B·K texts, evaluation K a test image. More than `SEQUENCES` are encoded in chunks, computed again in the
backward pass: memory is one chunk's, values and gradients are the whole batch's to rounding, and clients train in turn.
Paper against released code:
- Its scripts start from "a photo of a" (M = 4); 16 is only the default of its configuration.
- It trains on batches of one image for want of memory. Here it is the run's batch size.
- Its cosine schedule and warm-up are the run's (`lr_schedule`, `warmup_rounds`), off here. Recipe: SGD 2e-3, momentum
  0.9, decay 5e-4.
The meta-net starts as torch's linear layers do, so round 0 is not zero-shot. With W_b = 0 and c = 0 it is PromptFL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize, relu

from fedbench.api import FedbenchError, Method, Model, ModelSetup, Outputs, hookimpl, hyper, torch_generator
from fedbench.models.heads import clip_of, linear_layer
from fedbench.models.prompts.context import Init, initial_context, prompt_tower
from fedbench.models.prompts.image_tokens import in_chunks

SEQUENCES = 1024
"""Texts encoded at once, though never less than one image's: of each, ViT-B/16 keeps 1.4 MB for the gradient."""


@dataclass(frozen=True, kw_only=True)
class CoCoOpParams:
    """Hyper-parameters of CoCoOp."""

    reduction: int = hyper(16, symbol="r", low=1, high=64, search=False, source="released code: d / 16 inside")
    init: Init = hyper("words", symbol="v⁰", source='released scripts: "a photo of a"')
    context_length: int = hyper(
        4, symbol="M", low=1, high=32, search=(1, 16), when={"init": ("random",)}, source="released scripts; words: 4"
    )


def meta_net(features: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """b(x) = W_b relu(W_a f_x + a) + c: (b, d_t) from unit image ``features`` f_x (b, d)."""
    inner = relu(linear(features, weights["meta.inner.weight"], weights["meta.inner.bias"]))
    return linear(inner, weights["meta.outer.weight"], weights["meta.outer.bias"])


def conditional_context(features: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """v_m(x) = v_m + b(x): (b, 1, M, d_t), shared by an image's classes, from unit ``features`` f_x (b, d)."""
    return weights["prompt.context"] + meta_net(features, weights)[:, None, None, :]


class CoCoOp(Method[CoCoOpParams]):
    """A context that a small network moves for every image."""

    name = "cocoop"
    citation = "Zhou et al., Conditional Prompt Learning for Vision-Language Models, CVPR 2022"
    requires = ("clip", "context")
    recipe = {"optimizer": "sgd", "lr": 2e-3, "momentum": 0.9, "weight_decay": 5e-4}

    @hookimpl
    def build_model(self, setup: ModelSetup) -> Model:
        """Context and meta-net; logits are scaled cosines of the frozen image features to their own texts."""
        clip, params, seed = clip_of(setup), self.params, setup.spec.seed
        context = initial_context(clip, seed, params.context_length, params.init)
        tower = prompt_tower(clip, setup.classnames, len(context))
        hidden, generator = max(clip.embed_dim // params.reduction, 1), torch_generator(seed, "cocoop meta-net")
        meta = linear_layer("meta.inner", hidden, clip.embed_dim, generator)
        meta |= linear_layer("meta.outer", tower.width, hidden, generator)
        scale, size = clip.logit_scale, max(SEQUENCES // tower.num_classes, 1)
        # the last batch of a round may have one sample more
        is_chunked = setup.spec.training.batch_size + 1 > size

        def forward(tensors: Mapping[str, Tensor], inputs: Tensor, training: bool) -> Outputs:
            features = normalize(inputs, dim=-1)
            # under vmap the batch of a client, and so its memory, is out of sight
            if is_chunked and torch._C._functorch.is_batchedtensor(features):
                raise FedbenchError(f"cocoop takes {size} images at once with {tower.num_classes} classes.")

            def logits(images: Tensor) -> Tensor:
                texts = tower.encode(conditional_context(images, tensors))
                return scale * (texts @ images[:, :, None])[:, :, 0]

            return Outputs(in_chunks(logits, features, size), features)

        return Model(weights={"prompt.context": context, **meta}, forward=forward, encoder=clip.image_encoder())

"""MaPLe - Khattak, Rasheed, Maaz, Khan, Khan, "MaPLe: Multi-modal Prompt Learning", CVPR 2023; arXiv 2210.03117.

Prompts P_0 .. P_{J-1} (M, d_t) of the text tower and a linear map F_j of each to the image tower are trained; CLIP is
frozen:
    text   [start][P_0][name][.][end];  behind layer j-1 the places of the context are overwritten by P_j
    image  [class][patches][F_0(P_0)];  behind layer j-1 the last M tokens are overwritten by F_j(P_j)
    F_j(P) = P W_j^T + b_j,   W_j (d_v, d_t);   L = CE(s f_x·t_k, y)
All of them are sent: J M d_t + J (d_t d_v + d_v) floats. From layer J on the tokens flow through.

Answers: build_model. Everything else is FedAvg; stacks with methods that add loss terms or aggregate otherwise.
`maple+fedavg` of CAPT's tables is `maple`. The mean of the P_j and of the F_j is not the mean of the F_j(P_j).
Left open / contradicted:
- The paper is centralised. Recipe: its code's SGD 3.5e-3, decay 5e-4, without schedule and warm-up; CAPT: M = 4, 1e-3.
- As in the code `init=words` trains the first M words of "a photo of a" and keeps the others: "<P_0> of a name." if
  M = 2. P_1 .. and all F_j are drawn, so round 0 is not zero-shot CLIP.
- Towers with fewer than J layers get prompts at as many as the shallower one has. ResNets have no tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import linear, normalize

from fedbench.api import FedbenchError, Method, Model, ModelSetup, Outputs, Tensors, hookimpl, hyper, torch_generator
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.heads import TextOutputs, clip_of, linear_layer, scaled_logits
from fedbench.models.prompts.context import Init, prompt_tower, random_context, text_layers, word_context
from fedbench.models.prompts.image_tokens import encode_with_tokens, require_vision_transformer

log = logging.getLogger(__name__)
WORDS = ("a", "photo", "of", "a")


@dataclass(frozen=True, kw_only=True)
class MapleParams:
    """Hyper-parameters of MaPLe."""

    context_length: int = hyper(2, symbol="M", low=1, high=32, search=(1, 4), source="released code; CAPT: 4")
    depth: int = hyper(9, symbol="J", low=1, high=48, search=(1, 12), source="released code; at most all layers")
    init: Init = hyper("words", symbol="P_0", source="released code; words for M up to 4")


def couplings(depth: int, text_width: int, image_width: int, seed: int) -> Tensors:
    """F_j for j < ``depth``: W_j (d_v, d_t) and b_j (d_v,), each uniform in ±1/√d_t (torch's default)."""
    drawn: Tensors = {}
    for layer in range(depth):
        generator = torch_generator(seed, "maple coupling", layer)
        drawn |= linear_layer(f"coupling.{layer}", image_width, text_width, generator)
    return drawn


def initial_words(clip: ClipBackbone, length: int) -> tuple[Tensor, str]:
    """The first ``length`` (M) words of "a photo of a", embedded (M, d_t), and the other words, which stay."""
    context = word_context(clip, " ".join(WORDS[:length]))
    if length > len(WORDS) or len(context) != length:
        raise FedbenchError(
            f"maple.init=words has words for context_length 1 to {len(WORDS)}, each one token, got {length} for "
            f"backbone {clip.name!r}; set maple.init=random."
        )
    return context, " ".join(WORDS[length:])


class MaPLe(Method[MapleParams]):
    """Prompts in the first layers of both towers, those of images coupled to those of text."""

    name = "maple"
    citation = "Khattak et al., MaPLe: Multi-modal Prompt Learning, CVPR 2023"
    requires = ("clip", "context", "image_layers")
    recipe = {"optimizer": "sgd", "lr": 3.5e-3, "momentum": 0.9, "weight_decay": 5e-4}

    @hookimpl
    def build_model(self, setup: ModelSetup) -> Model:
        """The prompts and their couplings; logits are scaled cosines of what both towers make of them."""
        clip, length, seed = clip_of(setup), self.params.context_length, setup.spec.seed
        visual = require_vision_transformer(clip, "maple appends tokens to the image tower")
        depth = min(self.params.depth, visual.depth)
        if depth > 1:
            depth = min(depth, len(text_layers(clip, "maple puts prompts into")))
        if depth < self.params.depth:
            log.info("maple: prompts in %d layers, which is all that a tower of %s has", depth, clip.name)
        width = clip.text.width
        first, kept = random_context(seed, "context", length, width), ""
        if self.params.init == "words":
            first, kept = initial_words(clip, length)
        tower = prompt_tower(clip, [f"{kept} {name}".strip() for name in setup.classnames], length)
        weights = {"prompt.0": first}
        weights |= {f"prompt.{at}": random_context(seed, f"context {at}", length, width) for at in range(1, depth)}
        weights |= couplings(depth, width, visual.width, seed)

        def forward(tensors: Mapping[str, Tensor], inputs: Tensor, training: bool) -> Outputs:
            prompts = [tensors[f"prompt.{layer}"] for layer in range(depth)]
            maps = [(tensors[f"coupling.{layer}.weight"], tensors[f"coupling.{layer}.bias"]) for layer in range(depth)]
            tokens = [linear(prompt, weight, bias) for prompt, (weight, bias) in zip(prompts, maps, strict=True)]
            texts = tower.encode(prompts[0], deep=[[prompt] for prompt in prompts[1:]])
            features = normalize(encode_with_tokens(visual, inputs, tokens[0], deep=tokens[1:]), dim=-1)
            return TextOutputs(scaled_logits(features, texts, None, clip.logit_scale), features, texts)

        return Model(weights=weights, forward=forward, transform=clip.transform)

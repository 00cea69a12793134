"""CLIP-ZS - zero-shot CLIP: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision",
ICML 2021; a baseline of FST-CBDG (Yan and Guo, arXiv 2404.11046).

Predicts  argmax_k cos(I, T_k)  from image features I and text features T_k of "a photo of a {class}".

Answers: build_model (no weights, so nothing is trained or sent: the run is its round 0).
Stacks with nothing that trains.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn.functional import normalize

from fedbench.api import Method, Model, ModelSetup, NoParams, Outputs, hookimpl
from fedbench.models.heads import clip_of, scaled_logits


class ClipZeroShot(Method[NoParams]):
    """Zero-shot CLIP, nothing trained or sent."""

    name = "clip-zs"
    citation = "Radford et al., Learning Transferable Visual Models, ICML 2021"

    @hookimpl
    def build_model(self, setup: ModelSetup) -> Model:
        """No weights; logits are scaled cosines with the classes' text features."""
        clip = clip_of(setup)
        text = clip.text_features(setup.classnames, setup.spec.templates).to(setup.spec.device)

        def forward(tensors: Mapping[str, Tensor], inputs: Tensor, training: bool) -> Outputs:
            features = normalize(inputs, dim=-1)
            return Outputs(scaled_logits(features, text, None, clip.logit_scale), features)

        return Model(weights={}, forward=forward, encoder=clip.image_encoder())

"""FedGLCL - Yan, Feng, Zuo, Khan, Liu, Zhu, "On the Importance of Language-driven Representation Learning for
Heterogeneous Federated Learning", ICLR 2025.

An image encoder and a projector are trained to meet fixed text vectors T (one a class); there is no classifier:
    f = H ∘ G,  I_i = f(x_i) ∈ R^V                                       (Eqs. 4-5: body G, projector H)
    δ_ij = I_i · T_j / (|I_i| |T_j|)                                     (Eq. 6)
    l = −log [exp(δ_iy/τ) / Σ_{j≠y} exp(δ_ij/τ)]                         (Eq. 7)
    w ← Σ_k γ_k w_k,  γ_k = n_k / Σ n                                    (Eq. 3);   ŷ = argmax_j δ_j   (Eq. 8)
T is the run's text encoder (`backbone.text`) on the class prompts, computed once; its bytes are not counted as sent.

Answers: build_model, local_loss. Stacks with methods that add loss terms (`fedglcl+fedprox`, `fedglcl+moon`; MOON then
contrasts the unit embedding I) or aggregate otherwise. On a CNN, body and projector are trained; on CLIP the projector
alone, on frozen unit image features, starting at zero-shot CLIP where T is that CLIP's own text.
FedGLCL-L is `trainable_text=true`: every client trains the text encoder too, with the same loss; it is sent and
averaged with the rest. The paper gives no learning rate for it (here 0.1 of the run's). Every step encodes all prompts.

Paper against released code (Office-Caltech only): Eq. 7 leaves the positive out of the denominator, the code keeps it
(cross-entropy on δ/τ), and so does the default here. The code's text encoder is ALIGN's text tower (640-d), which the
paper calls BERT: `backbone.text=text:hf/kakaobrain/align-base`. Prompt "a photo of a {}" in the code, "a photo of {}"
in the paper: the run's `templates`. Code lr 0.01 on Office; paper 1e-4 there and on DomainNet, 0.1 on CIFAR-100 and
F-MNIST: so the recipe has no lr. The code weights its four clients equally (`weighting=uniform`).
Projectors: the code's for AlexNet is projector_norm=bn, final_relu=true on backbone alexnet?dense=1 (42.86 M in all);
Table 8's for ResNet-50 is projector=mlp, final_relu=true, its "Normalize" l2 or bn (5.51 M). A last ReLU bounds every
cosine by |max(T,0)|/|T|, about 0.71, so the default is none of them: one linear layer, cosines as in CLIP.
The paper neither prints its 85 prompts nor says how their vectors are averaged: here CLIP's 80 and five of our own
wording; unit vectors, mean, unit length again. Proxy names are drawn from the seed, never one of the classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fedbench.api as fb
from fedbench.api import FedbenchError, hookimpl, hyper
from fedbench.models.text.classifier import ProjectorShape, embedding_model, text_tower
from fedbench.models.text.vectors import class_text, encoder_hashes

IN_THE_SCENE = (
    "a {} in the scene.",
    "the {} in the scene.",
    "one of several {} in the scene.",
    "a photo of a {} in the scene.",
    "a scene with a {} in it.",
)


@dataclass(frozen=True, kw_only=True)
class FedGlclParams:
    """Hyper-parameters of FedGLCL."""

    tau: float = hyper(0.07, symbol="τ", low=0.01, high=1.0, log=True, source="section 5.1; smaller is better")
    denominator: Literal["include", "exclude"] = hyper(
        "include", symbol="j≠y", source="released code; exclude is Eq. 7 as printed"
    )
    projector: Literal["linear", "mlp"] = hyper(
        "linear", symbol="H", source="released code (AlexNet); mlp is Table 8 (ResNet-50)"
    )
    projector_norm: Literal["l2", "bn"] = hyper(
        "l2", symbol="Normalize", source="Table 8 says Normalize; bn in the released code"
    )
    final_relu: bool = hyper(False, symbol="ReLU", source="not the paper's: Table 8 and the code end in a ReLU")
    dim: int = hyper(
        640,
        symbol="V",
        low=2,
        high=4096,
        search=False,
        source="section 5.1; for drawn text vectors, an encoder has its own width",
    )
    prompt: Literal["template", "bare", "ensemble"] = hyper("template", symbol="prompt", source="section 3.2; Table 9")
    proxy: Literal["none", "imagenet"] = hyper(
        "none", symbol="proxy", source="Table 10: names of other classes in their place"
    )
    trainable_text: bool = hyper(False, symbol="FedGLCL-L", source="section 5.5, FedGLCL-L")
    text_lr_factor: float = hyper(
        0.1,
        symbol="η_T/η",
        low=1e-3,
        high=1.0,
        log=True,
        when={"trainable_text": (True,)},
        source="not in the paper; of FedGLCL-L only",
    )


def similarity_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Eq. 7, the mean of −δ_y/τ + log Σ_{j≠y} exp(δ_j/τ), from δ/τ (batch, C) and labels (batch,)."""
    positive = logits.gather(1, labels[:, None])
    negatives = logits.scatter(1, labels[:, None], -torch.inf)
    return (negatives.logsumexp(dim=1, keepdim=True) - positive).mean()


def proxy_names(classnames: Sequence[str], seed: int) -> tuple[str, ...]:
    """As many ImageNet names as there are classes, none of them a class's own. FedbenchError for too many classes."""
    from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES

    taken = {name.lower() for name in classnames}
    free = [name for name in dict.fromkeys(IMAGENET_CLASSNAMES) if name.lower() not in taken]
    if len(classnames) > len(free):
        raise FedbenchError(f"fedglcl.proxy=imagenet has {len(free)} names, not {len(classnames)}; use proxy=none.")
    order = torch.randperm(len(free), generator=fb.torch_generator(seed, "fedglcl-proxy"))
    return tuple(free[index] for index in order[: len(classnames)].tolist())


def prompt_templates(prompt: str, templates: Sequence[str]) -> tuple[str, ...]:
    """The prompts of a class, {} in its place: the run's ``templates``, the bare name, or the ensemble of 85."""
    if prompt == "bare":
        return ("{}",)
    if prompt == "ensemble":
        from open_clip.zero_shot_metadata import OPENAI_IMAGENET_TEMPLATES

        return (*(template("{}") for template in OPENAI_IMAGENET_TEMPLATES), *IN_THE_SCENE)
    return tuple(templates)


class FedGLCL(fb.Method[FedGlclParams]):
    """Class text instead of a classifier; any text encoder, also trained (FedGLCL-L)."""

    name = "fedglcl"
    citation = "Yan et al., Language-driven Representation Learning for Heterogeneous FL, ICLR 2025"
    recipe = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 1e-5}
    reads = ("text_encoder",)
    requires = ("labels",)

    @hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """Body and projector (Eqs. 4-5), the class text, and logits δ/τ (Eq. 6)."""
        chosen = self.params
        worded = setup
        if chosen.proxy == "imagenet":
            worded = replace(setup, classnames=proxy_names(setup.classnames, setup.spec.seed))
        templates = prompt_templates(chosen.prompt, setup.spec.templates)
        shape = ProjectorShape(kind=chosen.projector, norm=chosen.projector_norm, final_relu=chosen.final_relu)
        if not chosen.trainable_text:
            fixed = embedding_model(setup, class_text(worded, templates, dim=chosen.dim), 1 / chosen.tau, shape)
            return replace(fixed, weights_hashes=encoder_hashes(setup))
        tower = text_tower(worded, templates)
        model = embedding_model(setup, tower, 1 / chosen.tau, shape)
        factors = dict.fromkeys(tower.weights, chosen.text_lr_factor)
        return replace(model, lr_factors=factors, weights_hashes=encoder_hashes(setup))

    @hookimpl
    def local_loss(self, step: fb.LocalStep) -> Tensor:
        """Eq. 7, or cross-entropy on δ/τ, which keeps the positive in the denominator."""
        loss = cross_entropy if self.params.denominator == "include" else similarity_loss
        return loss(step.outputs.logits, step.labels)

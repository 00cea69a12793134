"""KgCoOp + FedAvg - Yao, Zhang, Xu, "Visual-Language Prompt Tuning with Knowledge-guided Context Optimization", CVPR
2023; federated by FedAvg, as in the comparisons of FedTPG, FLiP and CAPT.

PromptFL's context v ∈ R^{M×d_t}, held near texts that people wrote; CLIP is frozen:
    t_k = g([v; name_k]) / |·|,   t⁰_k the unit text feature of class k in the run's `templates` (frozen teacher)
    L = CE(s f_x·t_k, y) + λ L_kg
    L_kg = 1 − (1/K) Σ_k cos(t_k, t⁰_k)                    (`kg_form=cosine`, released code)
    L_kg = (1/K) Σ_k |t_k − t⁰_k|²                         (`kg_form=sqeuclid`, paper)
    v ← Σ_i (n_i / Σ_j n_j) v_i
Only v is trained and sent. Of unit vectors the paper's form is exactly twice the code's: λ of the one is λ/2 of the
other. λ = 0 is PromptFL bit for bit.

Answers: build_model, loss_terms. Stacks with methods that change the base loss, add terms or aggregate otherwise.
Paper against released code: the default is what the released scripts run, weight 8 on the cosine form; the paper's 8.0
read with its own formula is `kg_form=sqeuclid weight=8`, twice as strong, and the code's configuration file, like
FLiP, has 1.0 on the cosine form. The mean is over all K classes at every client, as what a client's own data say
nothing about is what has to be kept; the code knows no clients. The teacher reads the run's templates, so that L_kg
starts at 0 only with `templates` "a photo of a {}." and the words as initial context. Recipe: SGD 2e-3 of the code,
with momentum 0.9 and decay 5e-4 of the toolbox it is built on; its cosine is the run's `lr_schedule`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor

from fedbench.api import LocalStep, Method, Model, ModelSetup, hookimpl, hyper
from fedbench.models.heads import TextOutputs, clip_of, text_classifier
from fedbench.models.prompts.context import Init, initial_context, prompt_tower


@dataclass(frozen=True, kw_only=True)
class KgCoOpParams:
    """Hyper-parameters of KgCoOp."""

    weight: float = hyper(
        8.0, symbol="λ", low=0.1, high=20.0, log=True, off=0.0, source="released scripts, cosine form; 0 is PromptFL"
    )
    kg_form: Literal["cosine", "sqeuclid"] = hyper(
        "cosine", symbol="L_kg", source="released code; sqeuclid, twice it: the paper"
    )
    init: Init = hyper("words", symbol="v⁰", source='released code: always "a photo of a"')
    context_length: int = hyper(
        4,
        symbol="M",
        low=1,
        high=32,
        search=(1, 16),
        when={"init": ("random",)},
        source="released scripts; init=words has 4 by itself",
    )


def cosine_distance(texts: Tensor, teacher: Tensor) -> Tensor:
    """1 − (1/K) Σ_k t_k·t⁰_k, a scalar, from unit ``texts`` t and ``teacher`` t⁰, (K, d) each."""
    return 1 - (texts * teacher).sum(dim=-1).mean()


def squared_distance(texts: Tensor, teacher: Tensor) -> Tensor:
    """(1/K) Σ_k |t_k − t⁰_k|², a scalar, from ``texts`` t and ``teacher`` t⁰, (K, d) each."""
    return (texts - teacher).square().sum(dim=-1).mean()


class KgCoOp(Method[KgCoOpParams]):
    """PromptFL's context, held near hand-written texts."""

    name = "kgcoop"
    citation = "Yao et al., Prompt Tuning with Knowledge-guided Context Optimization, CVPR 2023"
    requires = ("clip", "context")
    recipe = {"optimizer": "sgd", "lr": 2e-3, "momentum": 0.9, "weight_decay": 5e-4}

    @hookimpl
    def build_model(self, setup: ModelSetup) -> Model:
        """The context as only weight, beside the teacher's texts of all classes, encoded once."""
        clip = clip_of(setup)
        context = initial_context(clip, setup.spec.seed, self.params.context_length, self.params.init)
        tower = prompt_tower(clip, setup.classnames, len(context))
        return Model(
            weights={"prompt.context": context},
            forward=text_classifier(lambda tensors: tower.encode(tensors["prompt.context"]), clip.logit_scale),
            encoder=clip.image_encoder(),
            constants={"text": clip.text_features(setup.classnames, setup.spec.templates)},
        )

    @hookimpl
    def loss_terms(self, step: LocalStep) -> Tensor | None:
        """λ L_kg, on the texts that the step's logits come from; none where λ = 0."""
        if not self.params.weight:
            return None
        distance = cosine_distance if self.params.kg_form == "cosine" else squared_distance
        texts = cast(TextOutputs, step.outputs).texts
        return self.params.weight * distance(texts, step.model.constants["text"])

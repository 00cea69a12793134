"""CLIP2FL - Shi, Zheng, Yin, Lu, Xie, Qu, "CLIP-guided Federated Learning on Heterogeneous and Long-Tailed Data",
AAAI 2024. CReFF (see `creff`) with CLIP on both sides:

    client:  L = CE(y, o) + β T² KL(softmax(u/T) ‖ softmax(o/T)),   u_c = 100 cos(I_enc(x), T_enc(prompt_c))     (Eq. 1)
    server:  V ← V − lr ∇ (Σ_c D(g_c^v, g_c) + η L_pcl)                                                   (Eqs. 6, 8)
             L_pcl = Σ_i [−cos(v_i, f_c)/τ + log Σ_{j≠i} exp(cos(v_i, v_j)/τ)],   f_c the text of v_i's class  (Eq. 7)
The rest, Eqs. 2-5, 9 and 10, is CReFF's: β = η = 0 is CReFF with the same values of what both have, bit for bit.

Answers: build_model (the default model, with a teacher and text features beside it), loss_terms, start, broadcast,
after_training, aggregate, evaluate. Stacks with methods that change the local loss only. Needs a linear head and, for
L_pcl, features as wide as CLIP's text, as with the paper's `resnet8?projector=512`. On frozen CLIP features what the
clients train, distillation included, does not reach the evaluation (but with head_start=global), only φ̂ does.
Paper against released code; `variant` decides for all that is left at "variant", and the paper is the default:
            paper                                      official
  L_pcl     Eq. 7: cosines, a sum over features        products with text only, a mean over features, the term of i
                                                       −s_ic + log(m Σ_c' exp s_ic' − exp s_ic), s_ic' = v_i·f_c'/τ
  D         mean over the weight's rows (Eq. 6)        rows summed, the bias as one row more
  head      goes on from φ̂^t (Eq. 10)                  new each round
  prompt    "This is a {}"                             the run's templates, whose default is the code's prompt
The official L_pcl has no effect at its η of 0.001 (suite longtail: the same accuracies as with η = 0). Not decided by
`variant`: β, the paper's best 3 and the code's 1 (default; its gradient is up to βT times cross-entropy's: a convnet,
without batch-norm, diverges at lr 0.1 and trains at 0.02); T and τ, not in the paper: the code's. lr_feature follows D,
whose mean makes the gradient C times the smaller. `variant=official features=100 retrain_epochs=300 lr_head=0.01` is
the code. Eq. 6 is summed over classes: a feature enters that of its own class only. Eq. 1 prints no T², the code has
it. The teacher sees images without augmentation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, normalize

from fedbench.api import AggregationTask, FedbenchError, LocalStep, Method, Model, ModelSetup, Tensors, hookimpl, hyper
from fedbench.models.heads import default_model, teacher_of
from fedbench_methods.shared.federated_features import (
    FeatureParams,
    FederatedFeatures,
    GradientForm,
    HeadStart,
    RetrainedHead,
)

TEACHER_SCALE = 100.0
"""Of the cosines in the teacher's logits: fixed in the released code, whatever scale the teacher learned."""
PAPER_PROMPT = "This is a {}"
Form = Literal["variant", "paper", "official"]


@dataclass(frozen=True, kw_only=True)
class CLIP2FLParams(FeatureParams):
    """Hyper-parameters of CLIP2FL: those of all federated features, two with other defaults, and its own."""

    # Eq. 7 pairs all C m features at each matching step. Suite longtail on embedded CLIP, C=10, d=128, one core:
    # m=10 69.8 %, m=20 69.9 % (0.13 s a round), m=50 69.4 % (0.7 s); m=100 3 s. At C=100, m=20 already 9 s.
    features: int = hyper(
        20, symbol="m", low=1, high=1000, log=True, search=(2, 50), source="paper 100; Eq. 7 costs its square"
    )
    lr_feature: float = hyper(
        0.0, symbol="lr_feature", low=0.0, high=100.0, search=False, source="0: 1 for the paper's D, 0.1 official"
    )
    beta: float = hyper(1.0, symbol="β", low=0.1, high=10.0, log=True, neutral=0.0, source="released code 1; paper 3")
    temperature: float = hyper(
        3.0, symbol="T", low=1.0, high=10.0, log=True, needs="beta", source="released code; not in the paper"
    )
    eta: float = hyper(
        1e-3,
        symbol="η",
        low=1e-5,
        high=1e3,
        log=True,
        neutral=0.0,
        search=(1e-5, 1.0),
        source="released code; paper 1e-5 to 1e-3 alike",
    )
    tau: float = hyper(0.1, symbol="τ", low=0.05, high=1.0, needs="eta", source="released code; not in the paper")
    variant: Literal["paper", "official"] = hyper(
        "paper", symbol="variant", source="paper, or released code where they disagree"
    )
    contrast_form: Form = hyper("variant", symbol="L_pcl", source="Eq. 7, or released code")
    gradient_form: Form = hyper("variant", symbol="D", source="Eq. 6, or released code")
    head_start: Literal["variant", "fresh", "warm", "global"] = hyper(
        "variant",
        symbol="φ̂",
        neutral="global",
        source="warm: Eq. 10; fresh: released code; global: from the FedAvg head",
    )
    prompt: Literal["variant", "paper", "templates"] = hyper(
        "variant", symbol="prompt", source=f"{PAPER_PROMPT}, or the run's"
    )


def teacher_logits(images: Tensor, text: Tensor) -> Tensor:
    """u = 100 cos(I_enc(x), T_enc(prompt)), (batch, C), from image features (batch, d) and unit ``text`` (C, d)."""
    return TEACHER_SCALE * normalize(images, dim=-1) @ text.T


def distillation(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """T² KL(softmax(u/T) ‖ softmax(o/T)) of logits u, o (batch, C), summed over classes, the batch's mean (Eq. 1)."""
    given, wanted = log_softmax(student / temperature, dim=1), log_softmax(teacher / temperature, dim=1)
    return temperature**2 * (wanted.exp() * (wanted - given)).sum(dim=1).mean()


def prototype_contrast(features: Tensor, text: Tensor, tau: float) -> Tensor:
    """Σ_i [−cos(v_i, f_c)/τ + log Σ_{j≠i} exp(cos(v_i, v_j)/τ)] (Eq. 7); features (C, m, d), unit ``text`` (C, d).

    All other features count in the denominator, those of the same class too; the positive pair does not.
    """
    unit = normalize(features, dim=-1)
    flat = unit.flatten(0, 1)
    itself = torch.eye(len(flat), dtype=torch.bool, device=flat.device)
    among = (flat @ flat.T / tau).masked_fill(itself, -torch.inf)
    return torch.logsumexp(among, dim=1).sum() - torch.einsum("cmd,cd->", unit, text) / tau


def text_contrast(features: Tensor, text: Tensor, tau: float) -> Tensor:
    """The released code's: mean over i of −s_ic + log(m Σ_c' exp s_ic' − exp s_ic), s_ic' = v_i·f_c'/τ, no cosine."""
    classes, per_class = features.shape[:2]
    products = features @ text.T / tau
    # how often each prototype stands in the denominator of a feature of each class
    copies = per_class - torch.eye(classes, dtype=features.dtype, device=features.device)
    own = products.diagonal(dim1=0, dim2=2).T
    return (torch.logsumexp(products + copies.log()[:, None], dim=2) - own).mean()


class CLIP2FL(RetrainedHead, Method[CLIP2FLParams]):
    """CReFF plus distillation from CLIP and a prototype contrast on the server."""

    name = "clip2fl"
    citation = "Shi et al., CLIP-guided Federated Learning on Heterogeneous and Long-Tailed Data, AAAI 2024"
    reads = ("teacher", "tune", "head_scale")
    requires = ("labels", "linear_head", "sent_head")

    def __init__(self, params: CLIP2FLParams) -> None:
        super().__init__(params)
        form: GradientForm = params.variant if params.gradient_form == "variant" else params.gradient_form
        usual: HeadStart = "warm" if params.variant == "paper" else "fresh"
        start = usual if params.head_start == "variant" else params.head_start
        rate = params.lr_feature or (1.0 if form == "paper" else 0.1)
        self.federated = FederatedFeatures(self.name, replace(params, lr_feature=rate), form, start)

    @hookimpl
    def build_model(self, setup: ModelSetup) -> Model:
        """The default model; beside it CLIP's image tower as teacher, and its text features as prototypes."""
        params, model, teacher = self.params, default_model(setup), teacher_of(setup)
        usual = "paper" if params.variant == "paper" else "templates"
        prompt = usual if params.prompt == "variant" else params.prompt
        text = teacher.text_features(setup.classnames, (PAPER_PROMPT,) if prompt == "paper" else setup.spec.templates)
        width, wanted = model.weights[model.linear_head.weight].shape[1], text.shape[1]
        if params.eta and width != wanted:
            raise FedbenchError(
                f"clip2fl compares features of {width} values with the teacher's text of {wanted}; write "
                f"projector={wanted} in the backbone's name, or set clip2fl.eta=0."
            )
        constants = {**model.constants, "text": text}
        side = {"teacher": teacher.image_encoder()}
        return replace(model, constants=constants, side_encoders=side, weights_hashes=(teacher.weights_hash,))

    @hookimpl
    def loss_terms(self, step: LocalStep) -> Tensor | None:
        """β times the distillation from CLIP (Eq. 1)."""
        if self.params.beta == 0:
            return None
        teacher = teacher_logits(step.batch.side["teacher"], step.model.constants["text"])
        return self.params.beta * distillation(teacher, step.outputs.logits, self.params.temperature)

    @hookimpl
    def aggregate(self, task: AggregationTask) -> Tensors:
        """The mean of the weights (Eq. 9); features by Eqs. 4-8, the head re-trained on them (Eq. 10)."""
        params = self.params
        if params.eta == 0:
            return self.federated.aggregate(task)
        form = params.variant if params.contrast_form == "variant" else params.contrast_form
        contrast, text = prototype_contrast if form == "paper" else text_contrast, task.model.constants["text"]
        return self.federated.aggregate(task, lambda features: params.eta * contrast(features, text, params.tau))

"""ProDA + FedAvg - Lu, Liu, Zhang, Liu, Tian, "Prompt Distribution Learning", CVPR 2022; arXiv 2205.03340; federated by
FedAvg.

N contexts v^1 .. v^N in R^{M×d_t} give every class N texts, read as draws of a Gaussian; CLIP is frozen:
    t_{k,n} = g([v^n; name_k]) / |·|,   μ_k = (1/N) Σ_n t_{k,n},   δ_{k,n} = t_{k,n} − μ_k
    σ²_{y,k}(f) = Σ_j f_j² (1/(N + 1)) Σ_n (δ_{y,n} − δ_{k,n})_j²
    L = CE(s f·μ_k + (s²/2) σ²_{y,k}(f), y) + α L_m                                     (s: CLIP's own scale, frozen)
    L_m = (1/(N (N − 1))) Σ_{n≠m} |cos(g(v^n), g(v^m))|,   g(v) the text of the context without a name
    v ← Σ_i (n_i / Σ_j n_j) v_i;   predictions by s f·μ_k
The first term bounds the expected cross-entropy under the Gaussian from above. A quarter of the contexts stand behind
the name, a quarter around it, the others before it. Trained and sent: N M d_t floats.

Answers: build_model, local_loss, loss_terms. Stacks with loss terms, server rules and personalisations; not with
another base loss.
Paper against released code:
- The paper has whole covariances over classes and dimensions; the code takes dimensions one by one, divides by N + 1,
  and leaves μ at its length, below 1: all of which is done here.
- The code draws 4 of the 32 contexts for every step, for memory; here each step takes all of them.
Recipe: the code's SGD 1e-3, with momentum and decay of the toolbox. Cost: N K texts a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

import fedbench.api as fb
from fedbench.models.heads import TextOutputs, clip_of, scaled_logits
from fedbench.models.prompts.context import Position, prompt_tower, random_context
from fedbench.toolkit.losses import mean_cross_entropy

CONTEXTS = "contexts"


@dataclass(frozen=True, kw_only=True)
class ProDaParams:
    """Hyper-parameters of ProDA."""

    prompts: int = fb.hyper(32, symbol="N", low=2, high=64, search=(4, 32), source="paper and released code")
    context_length: int = fb.hyper(16, symbol="M", low=1, high=64, search=(4, 16), source="paper and released code")
    alpha: float = fb.hyper(0.1, symbol="α", low=1e-3, high=10.0, log=True, off=0.0, source="released code")


@dataclass(frozen=True, eq=False)
class DistributedOutputs(TextOutputs):
    """Of a classifier by ``texts`` μ (K, d), in training with what they are the mean of."""

    deviations: Tensor
    """δ (N, K, d)."""
    alone: Tensor
    """Unit texts g(v^n) (N, d)."""
    scale: float
    """s."""


def variances(features: Tensor, deviations: Tensor, labels: Tensor) -> Tensor:
    """σ²_{y,k}(f), (b, K), of unit ``features`` (b, d), ``deviations`` δ (N, K, d) and ``labels`` y (b,)."""
    squares, own = features.square(), deviations[:, labels]
    of_classes = torch.einsum("bd,nkd->bk", squares, deviations.square())
    of_labels = torch.einsum("bd,nbd->b", squares, own.square())
    shared = torch.einsum("nbd,nkd->bk", squares * own, deviations)
    return (of_classes + of_labels[:, None] - 2 * shared) / (len(deviations) + 1)


def closeness(texts: Tensor) -> Tensor:
    """L_m, a scalar, of unit ``texts`` (N, d) of contexts without a name."""
    count = len(texts)
    others = 1 - torch.eye(count, device=texts.device)
    return ((texts @ texts.T).abs() * others).sum() / (count * (count - 1))


def positions(count: int) -> list[tuple[Position, int]]:
    """Where the context stands, and how many of ``count`` (N) do there, in their order."""
    quarter = count // 4
    return [("front", quarter), ("middle", quarter), ("end", count - 2 * quarter)]


class ProDA(fb.Method[ProDaParams]):
    """A Gaussian of every class's texts, of many contexts."""

    name = "proda"
    citation = "Lu et al., Prompt Distribution Learning, CVPR 2022"
    requires = ("labels", "clip", "context")
    recipe = {"optimizer": "sgd", "lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}

    @fb.hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """The contexts as only weight; logits by the mean text of every class."""
        clip, params = clip_of(setup), self.params
        length, groups = params.context_length, [each for each in positions(params.prompts) if each[1]]
        towers = [prompt_tower(clip, setup.classnames, length, position) for position, _ in groups]
        nameless = prompt_tower(clip, [""], length)

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
            contexts, features = tensors[CONTEXTS][:, None], normalize(inputs, dim=-1)
            parts = torch.split(contexts, [count for _, count in groups])
            texts = torch.cat([tower.encode(part) for tower, part in zip(towers, parts, strict=True)])
            mean = texts.mean(dim=0)
            logits = scaled_logits(features, mean, None, clip.logit_scale)
            if not training:
                return TextOutputs(logits, features, mean)
            alone = nameless.encode(contexts)[:, 0]
            return DistributedOutputs(logits, features, mean, texts - mean, alone, clip.logit_scale)

        drawn = random_context(setup.spec.seed, "contexts of proda", params.prompts, length, clip.text.width)
        return fb.Model({CONTEXTS: drawn}, forward, encoder=clip.image_encoder())

    @fb.hookimpl
    def local_loss(self, step: fb.LocalStep) -> Tensor:
        """Cross-entropy of the logits with half their variance."""
        made = cast(DistributedOutputs, step.outputs)
        spread = variances(made.features, made.deviations, step.labels)
        return mean_cross_entropy(made.logits + made.scale**2 / 2 * spread, step.labels)

    @fb.hookimpl
    def loss_terms(self, step: fb.LocalStep) -> Tensor | None:
        """α L_m; none where α = 0."""
        made = cast(DistributedOutputs, step.outputs)
        return self.params.alpha * closeness(made.alone) if self.params.alpha else None

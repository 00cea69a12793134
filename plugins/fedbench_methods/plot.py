"""PLOT + FedAvg - Chen, Yao, Song, Li, Rao, Zhang, "PLOT: Prompt Learning with Optimal Transport for Vision-Language
Models", ICLR 2023; arXiv 2210.01253; federated by FedAvg.

N prompts v^1 .. v^N in R^{M×d_t} are matched with an image's patches; CLIP is frozen:
    t_{k,n} = g([v^n; name_k]) / |·|;   F ∈ R^{P×d} unit patch features;   S_pn = F_p·t_{k,n}
    T = argmin_T ⟨1 − S, T⟩ − ε H(T)   with T 1 = 1/P (rows) and Tᵀ1 = 1/N (columns),   by Sinkhorn's iterations;
        one for each image and class, without a gradient
    logit_k = s ⟨T, S⟩,   L = CE                                                       (s: CLIP's own scale, frozen)
    v ← Σ_i (n_i / Σ_j n_j) v_i
Trained and sent: N M d_t floats. With N = 1 a logit is s times the mean cosine of the patches.

Answers: build_model. Everything else is FedAvg; stacks with losses, server rules and personalisations alike. Any CLIP
whose tower has features of single patches (`ClipPatchEncoder`), which are cached. `fedotp` is the same with one global
and one private prompt, and rows relaxed.
Paper against released code, and left open:
- The code stops where the scalings of patches, in the mean over the whole batch, move by less than 0.01. Here those of
  prompts do, for each image and class by itself, so that predictions do not depend on the rest of a batch.
- On ImageNet alone the code adds the logits of the pooled feature; not here.
Recipe: SGD 2e-3 of the code, with momentum and decay of the toolbox it is built on.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import fedbench.api as fb
from fedbench.models.heads import clip_of
from fedbench.models.prompts.context import prompt_tower, random_context
from fedbench_methods.shared.patches import ClipPatchEncoder
from fedbench_methods.shared.transport import Transport, transported

PROMPTS = "prompts"


@dataclass(frozen=True, kw_only=True)
class PlotParams:
    """Hyper-parameters of PLOT."""

    prompts: int = fb.hyper(4, symbol="N", low=1, high=32, search=(2, 8), source="paper and released code")
    context_length: int = fb.hyper(16, symbol="M", low=1, high=64, search=(4, 16), source="released code")
    eps: float = fb.hyper(0.1, symbol="ε", low=0.01, high=0.5, log=True, source="released code")
    thresh: float = fb.hyper(0.01, symbol="thresh", low=0.0, high=1.0, search=False, source="released code")
    max_iter: int = fb.hyper(100, symbol="iterations", low=1, high=10_000, search=False, source="released code")


class PLOT(fb.Method[PlotParams]):
    """Several prompts, matched with an image's patches by optimal transport."""

    name = "plot"
    citation = "Chen et al., PLOT: Prompt Learning with Optimal Transport for Vision-Language Models, ICLR 2023"
    requires = ("clip", "context", "patches")
    recipe = {"optimizer": "sgd", "lr": 2e-3, "momentum": 0.9, "weight_decay": 5e-4}

    @fb.hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """The prompts as only weight; logits from the patches of an image and the texts of all."""
        clip, params = clip_of(setup), self.params
        tower, scale = prompt_tower(clip, setup.classnames, params.context_length), clip.logit_scale
        how = Transport(params.eps, 1.0, params.thresh, params.max_iter, balanced=True)

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
            texts = tower.encode(tensors[PROMPTS][:, None])
            return fb.Outputs(scale * transported(inputs, texts, how, checked=not training), inputs.mean(dim=1))

        drawn = random_context(setup.spec.seed, "contexts of plot", params.prompts, params.context_length, tower.width)
        return fb.Model({PROMPTS: drawn}, forward, encoder=ClipPatchEncoder(clip))

"""FedOTP - Li, Huang, Wang, Shi, "Global and Local Prompts Cooperation via Optimal Transport for Federated Learning",
CVPR 2024; arXiv 2403.00041.

A global prompt v^g and one of each client's own v^l, in R^{M×d_t}, divide an image's patches; CLIP is frozen:
    t_{k,n} = g([v^n; name_k]) / |·|, n ∈ {g, l};   F ∈ R^{P×d} unit patch features;   S_pn = F_p·t_{k,n}
    T = argmin_T ⟨1 − S, T⟩ − ε H(T)   with T 1 ≤ 1/P (rows, relaxed) and Tᵀ1 = γ/2 (columns)
      by  u ← min(1, (1/P) / (Q v)),  v ← (γ/2) / (Qᵀ u),  Q = exp(−(1 − S)/ε), from u = v = 1 until mean |Δv| < thresh;
      T = diag(u) Q diag(v), one for each image and class, without a gradient
    logit_k = s ⟨T, S⟩,   L = CE                                   (s: CLIP's own scale, frozen; the mass γ scales it)
    v^g ← Σ_i (n_i / Σ_j n_j) v^g_i;   v^l stays
v^g is sent; v^l is not, nor counted or averaged. All v^l begin at one draw of the server, other than that of v^g.

Answers: build_model, private, evaluate. Stacks with methods that change the loss or aggregate otherwise; terms on the
weights (fedprox) hold v^l as well. Any CLIP whose tower has features of single patches (`ClipPatchEncoder`), which are
cached: P d halves an image, 8 times its pooled feature for clip:embedded and 98 times for ViT-B/16.
Own models, in the columns `personal_...`, are the new v^g with the client's v^l; a client that has not taken part has
the first draw. The global model has v^g in both places, so that its columns know nothing of any client. v^l stays as
trained where the update with v^g was lost.
Paper against released code: the script of CIFAR-100 has M = 4 and ε = 0.1, that of few shots 16 and 0.01, and γ is 0.8
in both but 1 by default. The code lets all clients train in the first round and carries SGD's momentum from client to
client; here the run's participation holds, and every client begins anew. Columns of Q are divided by their largest
entry, which changes no iterate's plan and keeps exp from underflow at small ε. The stop is judged for each image and
class by itself: predictions do not depend on the rest of a batch. Recipe: SGD 1e-3 of the code, with momentum 0.9 and
decay 5e-4 of the toolbox it is built on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.api import hookimpl, hyper
from fedbench.models.heads import clip_of
from fedbench.models.prompts.context import initial_context, prompt_tower, random_context
from fedbench.toolkit.fedavg import personal_predictions
from fedbench_methods.shared.patches import ClipPatchEncoder
from fedbench_methods.shared.transport import Transport, transported

GLOBAL, LOCAL = "prompt.global", "prompt.local"


@dataclass(frozen=True, kw_only=True)
class FedOtpParams:
    """Hyper-parameters of FedOTP."""

    context_length: int = hyper(
        16, symbol="M", low=1, high=64, search=(4, 16), source="released code; its CIFAR-100 script: 4"
    )
    eps: float = hyper(0.1, symbol="ε", low=0.01, high=0.5, log=True, source="released code; its few-shot script: 0.01")
    gamma: float = hyper(0.8, symbol="γ", low=0.5, high=1.0, source="released scripts; 1 transports every patch")
    thresh: float = hyper(1e-3, symbol="thresh", low=0.0, high=1.0, search=False, source="released code; mean |Δv|")
    max_iter: int = hyper(100, symbol="iterations", low=1, high=10_000, search=False, source="released code")


class FedOTP(fb.Method[FedOtpParams]):
    """A global and a private prompt divide an image's patches by optimal transport."""

    name = "fedotp"
    citation = "Li et al., Global and Local Prompts Cooperation via Optimal Transport for FL, CVPR 2024"
    requires = ("clip", "context", "patches")
    recipe = {"optimizer": "sgd", "lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}
    keeps_lost_training = True

    @hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """Both prompts; logits from the patches of an image and the texts of both."""
        clip, params, seed = clip_of(setup), self.params, setup.spec.seed
        tower = prompt_tower(clip, setup.classnames, params.context_length)
        scale, how = clip.logit_scale, Transport(params.eps, params.gamma, params.thresh, params.max_iter)

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
            texts = tower.encode(torch.stack([tensors[GLOBAL], tensors[LOCAL]])[:, None])
            logits = scale * transported(inputs, texts, how, checked=not training)
            return fb.Outputs(logits, inputs.mean(dim=1))

        weights = {
            GLOBAL: initial_context(clip, seed, params.context_length, "random"),
            LOCAL: random_context(seed, "local context", params.context_length, tower.width),
        }
        return fb.Model(weights=weights, forward=forward, encoder=ClipPatchEncoder(clip))

    @hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """The local prompt."""
        return (LOCAL,)

    @hookimpl
    def evaluate(self, task: fb.EvaluationTask) -> fb.Predictions:
        """The global model by v^g alone, in both places; own models by the new v^g and the client's v^l."""
        return personal_predictions(task, {LOCAL: task.weights[GLOBAL]})

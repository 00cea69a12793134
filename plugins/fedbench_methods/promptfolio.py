"""PromptFolio - Pan, Huang, Shi, "Federated Learning from Vision-Language Foundation Models: Theoretical Analysis and
Method", NeurIPS 2024; arXiv 2409.19610.

A prompt v_G that all clients share and one of each client's own v_L, in R^{M×d_t}, whose texts are mixed like two
assets; CLIP is frozen:
    t_k = (1 − θ) g([v_G; name_k]) / |·| + θ g([v_L; name_k]) / |·|                        (not normalised again)
    L = CE(s f_x·t_k, y)                                                               (s: CLIP's own scale, frozen)
    v_G ← Σ_i (n_i / Σ_j n_j) v_G,i;   v_L stays
Only v_G is sent, counted, averaged. θ = 0 is PromptFL, θ = 1 CoOp at every client alone.

Answers: build_model, private, evaluate. Stacks with losses and server rules; terms on the weights (fedprox) hold v_L as
well. It is a personalisation itself. v_L stays where an update was lost.
|t_k|² = 1 − 2 θ (1 − θ) (1 − cos) where the two texts disagree: θ also lowers the scale of the logits.
Own models are the new v_G with the client's v_L; a client that has not taken part has the first draw. The global model
has v_G in both places, which is θ = 0: its columns know nothing of any client.
Paper against released code: the code averages over participants by their clients' numbers, so that other clients'
prompts, or none, are found where not all take part; the definition is what runs here. Its script's θ, M and rate (SGD
2e-3; momentum and decay are its toolbox's) are the defaults; the two prompts a side of its script are one here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

import fedbench.api as fb
from fedbench.models.heads import clip_of, text_classifier
from fedbench.models.prompts.context import initial_context, prompt_tower, random_context
from fedbench.toolkit.fedavg import personal_predictions

GLOBAL, LOCAL = "prompt.global", "prompt.local"


@dataclass(frozen=True, kw_only=True)
class PromptFolioParams:
    """Hyper-parameters of PromptFolio."""

    context_length: int = fb.hyper(8, symbol="M", low=1, high=64, search=(4, 16), source="released code: 8")
    theta: float = fb.hyper(0.4, symbol="θ", low=0.0, high=1.0, source="released code; FOCoOp's re-implementation: 0.2")


def portfolio(shared: Tensor, own: Tensor, theta: float) -> Tensor:
    """t (K, d) of the unit texts of both prompts, (K, d) each."""
    return (1 - theta) * shared + theta * own


class PromptFolio(fb.Method[PromptFolioParams]):
    """Texts of a shared and of a private prompt, mixed."""

    name = "promptfolio"
    citation = "Pan et al., FL from Vision-Language Foundation Models: Theoretical Analysis and Method, NeurIPS 2024"
    requires = ("clip", "context")
    recipe = {"optimizer": "sgd", "lr": 2e-3, "momentum": 0.9, "weight_decay": 5e-4}
    keeps_lost_training = True

    @fb.hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """Both prompts; logits by the mixture of their texts."""
        clip, seed, length = clip_of(setup), setup.spec.seed, self.params.context_length
        tower = prompt_tower(clip, setup.classnames, length)

        def texts(tensors: fb.Tensors) -> Tensor:
            # one after the other, so that at θ = 0 they are PromptFL's bits
            return portfolio(tower.encode(tensors[GLOBAL]), tower.encode(tensors[LOCAL]), self.params.theta)

        weights = {
            GLOBAL: initial_context(clip, seed, length, "random"),
            LOCAL: random_context(seed, "local context", length, tower.width),
        }
        return fb.Model(weights, text_classifier(texts, clip.logit_scale), encoder=clip.image_encoder())

    @fb.hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """v_L."""
        return (LOCAL,)

    @fb.hookimpl
    def evaluate(self, task: fb.EvaluationTask) -> fb.Predictions:
        """The global model by v_G alone, in both places; own models by the new v_G and the client's v_L."""
        return personal_predictions(task, {LOCAL: task.weights[GLOBAL]})

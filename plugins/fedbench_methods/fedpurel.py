"""FedPuReL - Hou, Shang, Yang, Yang, Shang, Gao, Zhang, Lu, "Fine-Tuning Impairs the Balancedness of Foundation Models
in Long-Tailed Personalized Federated Learning", CVPR 2026.

A prompt v_G (M, d_t) that all clients share and one of each client's own v_L; z_G, z_L are scaled cosines of an image
to the texts of either, z⁰ those to the texts of frozen CLIP. A round has two stages, an exchange each:
1. v_G by purified gradients: g of CE(z_G, y), h of the mean over samples of KL(p_t ‖ p_s),
    p_t = softmax(z⁰/τ_t), p_s = softmax(z_G/τ_s), τ_t and τ_s such that each has the entropy (H(z⁰) + H(z_G)) / 2
    g' = g − λ (⟨g, h⟩ / |h|²) h where ⟨g, h⟩ < 0, else g;      v_G ← Σ_i (n_i / Σ_j n_j) v_G,i
2. v_L beside the new v_G, which stays:   L = α CE(z_L, y) + (1 − α) CE(z_G + z_L, y)
Each sample has temperatures of its own, by 20 bisections of [0.05, 20]; they are constants to h. Only v_G is sent.
The global model predicts by z_G, a client's own by z_G + z_L. λ = 0: v_G is PromptFL's, bit for bit.

Answers: build_model, private, exchanges, evaluate. Wraps: local_gradients, local_objective, aggregate (stage 2 leaves
the server's weights). Stacks with losses on outputs and with server rules; they see stage 1 alone. It is itself a
personalisation. v_L stays where an update was lost.
All formulas are those of the released code (shihaohou/FedPuReL, commit 20ce20a); the paper's text was not at hand. Left
open / contradicted:
- α = 0.99 weighs CE(z_L) in the code, so that v_L hardly learns a residual of z_G, which is what the abstract says. The
  opposite order is α = 0.01.
- The code steps stage 2 by SGD without momentum or decay; here both stages have the run's optimiser, and the epochs.
- The code's momentum goes from client to client in stage 1, and its KL clamps probabilities at 1e-12; here momentum
  begins anew with each, and nothing is clamped.
- In the code all clients train in round 1; here participation holds. Its schedule of rates, its half precision and its
  forms for LoRA and adapters are not here.
- z⁰ is of the run's `templates`; the code has one a data set. h = 0 leaves g, where the code divides by zero.
Cost: two passes over a client's samples; a second backward pass in the first; clients train one after another. v_G goes
down twice a round, as it has to, and is counted up twice, of which the second is not needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

import fedbench.api as fb
from fedbench.models.heads import clip_of, text_classifier
from fedbench.models.prompts.context import initial_context, prompt_tower, random_context
from fedbench.toolkit.fedavg import largest_logit, predicted_classes
from fedbench.toolkit.local_training import in_precision
from fedbench.toolkit.losses import mean_cross_entropy, mean_divergence
from fedbench.toolkit.wrapping import Aggregate, Aggregated, Gradients, Objective, beside, global_step

GLOBAL, LOCAL, TEXTS = "prompt.global", "prompt.local", "fedpurel.texts"
BISECTIONS, COLDEST, HOTTEST = 20, 0.05, 20.0


@dataclass(frozen=True, kw_only=True)
class FedPuReLParams:
    """Hyper-parameters of FedPuReL."""

    context_length: int = fb.hyper(4, symbol="M", low=1, high=64, search=(4, 16), source="released code: 4")
    strength: float = fb.hyper(
        1.0, symbol="λ", low=0.01, high=1.0, off=0.0, search=(0.1, 1.0), source="released code: 1"
    )
    alpha: float = fb.hyper(0.99, symbol="α", low=0.0, high=1.0, source="released code: 0.99, of CE(z_L)")


def entropy(logits: Tensor) -> Tensor:
    """H of softmax(``logits``), (b,), in nats, of (b, C)."""
    logs = torch.log_softmax(logits, dim=1)
    return -(logs.exp() * logs).sum(dim=1)


def temperature(logits: Tensor, wanted: Tensor) -> Tensor:
    """τ (b, 1) at which softmax(z/τ) of ``logits`` z (b, C) has the entropy ``wanted`` (b,), or an end of the range."""
    low, high = torch.full_like(wanted, COLDEST), torch.full_like(wanted, HOTTEST)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        above = entropy(logits / middle[:, None]) > wanted
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return ((low + high) / 2)[:, None]


def divergence(logits: Tensor, known: Tensor) -> Tensor:
    """KL(p_t ‖ p_s), a scalar, from ``logits`` z_G and zero-shot ones ``known`` z⁰, (b, C) each."""
    fixed = logits.detach().float()
    wanted = (entropy(fixed) + entropy(known)) / 2
    return mean_divergence(logits / temperature(fixed, wanted), known / temperature(known, wanted))


def purified(g: Tensor, h: Tensor, strength: float) -> Tensor:
    """g' of ``g`` and ``h``, of one shape."""
    along = (g * h).sum()
    return torch.where(along < 0, g - strength * along / h.square().sum() * h, g)


def residual_loss(shared: Tensor, own: Tensor, labels: Tensor, alpha: float) -> Tensor:
    """L of stage 2, a scalar, from ``shared`` z_G and ``own`` z_L, (b, C) each."""
    return alpha * mean_cross_entropy(own, labels) + (1 - alpha) * mean_cross_entropy(shared + own, labels)


def with_residual(model: fb.Model) -> fb.Model:
    """``model`` with logits z_G + z_L."""

    def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
        shared, own = (model.forward({GLOBAL: tensors[name]}, inputs, training) for name in (GLOBAL, LOCAL))
        return replace(shared, logits=shared.logits + own.logits)

    return replace(model, forward=forward)


class FedPuReL(fb.Method[FedPuReLParams]):
    """A shared prompt by gradients that keep zero-shot balance, and a private one whose logits are added."""

    name = "fedpurel"
    citation = "Hou et al., Fine-Tuning Impairs the Balancedness of Foundation Models in Long-Tailed PFL, CVPR 2026"
    requires = ("labels", "clip", "context")
    prevents = ("plain_steps", "sent_steps")
    recipe = {"optimizer": "sgd", "lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}
    keeps_lost_training = True

    @fb.hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """Logits z_G, with v_L beside it."""
        clip, seed, length = clip_of(setup), setup.spec.seed, self.params.context_length
        tower = prompt_tower(clip, setup.classnames, length)
        model = fb.Model(
            weights={GLOBAL: initial_context(clip, seed, length, "random")},
            forward=text_classifier(lambda tensors: tower.encode(tensors[GLOBAL]), clip.logit_scale),
            encoder=clip.image_encoder(),
            constants={TEXTS: clip.logit_scale * clip.text_features(setup.classnames, setup.spec.templates)},
        )
        return beside(model, {LOCAL: random_context(seed, "local context", length, tower.width)})

    @fb.hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """v_L."""
        return (LOCAL,)

    @fb.hookimpl
    def exchanges(self, round: int, spec: fb.RunSpec, state: Mapping[str, fb.Tensors]) -> int:
        """One a stage."""
        return 2

    @fb.wrapper
    def local_gradients(self, step: fb.LocalStep, rest: Gradients) -> fb.StepGradients:
        """Stage 1: g' in place of the stack's g."""
        if step.task.exchange:
            return rest(step)
        step = global_step(step)
        if not self.params.strength:
            return rest(step)
        with in_precision(step):
            loss = divergence(step.outputs.logits, normalize(step.batch.inputs, dim=-1) @ step.model.constants[TEXTS].T)
        (h,) = torch.autograd.grad(loss, step.weights[GLOBAL], retain_graph=True)
        of_stack = rest(step)
        return replace(of_stack, by_name={GLOBAL: purified(of_stack.by_name[GLOBAL], h, self.params.strength)})

    @fb.wrapper
    def local_objective(self, step: fb.LocalStep, rest: Objective) -> Tensor:
        """Stage 1: the stack's loss. Stage 2: L, with a gradient in v_L alone."""
        if not step.task.exchange:
            return rest(step)
        shared = step.outputs_of({GLOBAL: step.received[GLOBAL]}, {}).logits
        own = step.model.forward({GLOBAL: step.weights[LOCAL]}, step.batch.inputs, True).logits
        return residual_loss(shared, own, step.labels, self.params.alpha)

    @fb.wrapper
    def aggregate(self, task: fb.AggregationTask, rest: Aggregate) -> Aggregated:
        """Stage 1: the stack's server step. Stage 2 has none."""
        return dict(task.weights) if task.exchange else rest(task)

    @fb.hookimpl
    def evaluate(self, task: fb.EvaluationTask) -> fb.Predictions:
        """The global model by z_G, own models by z_G + z_L; what was fine-tuned is z_G."""
        answer = largest_logit(replace(task, clients=()))
        if task.client is not None:
            return answer
        both = replace(task, model=with_residual(task.model))
        own = {client: predicted_classes(both, *task.own_model(client)) for client in task.clients}
        return replace(answer, by_client=own)

"""pFedMoAP - Luo, Chen, Wu, "Mixture of Experts Made Personalized: Federated Prompt Learning for Vision-Language
Models", ICLR 2025; arXiv 2410.10114.

Each client trains a prompt P (M, d_t) and a gate of its own, an attention over the class texts of P and of prompts P_1,
..., P_{K−1} of other clients, which are experts and stay as received. With t_c unit texts, f unit image features of
width d, π(z) every r-th entry of z, r = d / d_g:
    q = π(f),   v = {π(t_c(P)), π(t_c(P_1)), ...}   (keys and values),
    h_c = W_o [softmax(κ (W_q q)(W_k v)ᵀ) W_v v, all heads side by side]          (κ in place of 1/√width of a head)
    logits: λ s f·t_c(P) + s π(f)·h_c,  of neither are π(f) and h_c brought to unit length;   L = CE
    P ← Σ_i p_i P_i of the round's clients;  the gate stays
In its first participation a client has no experts, and trains s f·t_c(P) alone. The server keeps the last prompt of
every client and sends a client those K − 1 of others nearest to its own, in Euclidean distance.

Answers: build_model, private, local_loss, after_training (forgets the experts' texts), evaluate. Wraps: broadcast,
aggregate (to keep the prompts; the mean is the stack's). Stacks with methods that add terms or aggregate otherwise. P
alone is the global model, as in PromptFL; own ones add the client's gate, once trained, and experts by its last prompt.
Left open / contradicted: in released code the nearest experts never run (10 clients, K = 10: all are taken; with more
the call fails), random ones keep one order for a run (`experts=random` draws anew), a client trains on with the gate
used last, and a dropout is declared, not applied: none of it here. Gate's rate: 0.01 to the prompt's 0.002, or 0.001.
Cost: M d_t floats up, up to K M d_t down. Clients train one after another: experts' texts are encoded once a round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

import fedbench.api as fb
from fedbench.api import hyper
from fedbench.models.heads import TextOutputs, clip_of, linear_layer, scaled_logits
from fedbench.models.prompts.context import initial_context, prompt_tower
from fedbench.toolkit.fedavg import cross_entropy, largest_logit, predicted_classes
from fedbench.toolkit.wrapping import Aggregate, Aggregated, Send

CONTEXT, TEXTS, EXPERTS = "prompt.context", "pfedmoap.texts", "pfedmoap.experts"


@dataclass(frozen=True, kw_only=True)
class PFedMoAPParams:
    """Hyper-parameters of pFedMoAP."""

    context_length: int = hyper(16, symbol="M", low=1, high=64, search=(4, 16), source="released code: 16")
    number: int = hyper(10, symbol="K", low=2, high=100, search=(2, 10), source="released code: 10")
    width: int = hyper(128, symbol="d_g", low=8, high=1024, search=False, source="released code: 128")
    heads: int = hyper(8, symbol="heads", low=1, high=64, search=False, source="released code: 8")
    sharpness: float = hyper(10.0, symbol="κ", low=0.01, high=100.0, log=True, source="released code: 10")
    local_weight: float = hyper(0.5, symbol="λ", low=0.01, high=10.0, off=0.0, source="released code: 0.5")
    gate_rate: float = hyper(5.0, symbol="η_g / η", low=0.1, high=10.0, log=True, source="released code: .01 / .002")
    experts: Literal["nearest", "random"] = hyper("nearest", symbol="P_j", source="the paper tries both")


def pooled(features: Tensor, width: int) -> Tensor:
    """π: every r-th entry of ``features`` (..., d), r = d / ``width`` rounded down, at least 1."""
    return features[..., :: max(features.shape[-1] // width, 1)]


def gated(query: Tensor, values: Tensor, gate: Mapping[str, Tensor], heads: int, sharpness: float) -> Tensor:
    """h (b, C, e) of ``query`` (b, e) over ``values`` (K, C, e), by the layers "query", "key", "value" and "out"."""

    def split(name: str, rows: Tensor) -> Tensor:
        made = linear(rows, gate[f"gate.{name}.weight"], gate[f"gate.{name}.bias"])
        return made.view(*made.shape[:-1], heads, made.shape[-1] // heads)

    scores = torch.einsum("bhe,kche->bchk", split("query", query), split("key", values))
    mixed = torch.einsum("bchk,kche->bche", torch.softmax(sharpness * scores, -1), split("value", values))
    return linear(mixed.flatten(-2), gate["gate.out.weight"], gate["gate.out.bias"])


def nearest(own: Tensor, others: Tensor, count: int) -> list[int]:
    """Which ``count`` of the prompts ``others`` (n, M, d_t) are nearest to ``own`` (M, d_t), the nearest first."""
    order = (others - own).flatten(1).square().sum(dim=1).argsort(stable=True)
    return [int(place) for place in order[:count]]


class PFedMoAP(fb.Method[PFedMoAPParams]):
    """Mixes the texts of other clients' prompts by a gate of each client's own."""

    name = "pfedmoap"
    citation = "Luo et al., Mixture of Experts Made Personalized: Federated Prompt Learning for VLMs, ICLR 2025"
    requires = ("labels", "clip", "context", "own_updates")
    recipe = {"optimizer": "sgd", "lr": 2e-3, "momentum": 0.9, "weight_decay": 5e-4}
    keeps_lost_training = True

    @fb.hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """P and the gate; logits by P alone where a pass has no experts' texts (K − 1, C, d)."""
        clip, params, seed = clip_of(setup), self.params, setup.spec.seed
        self._seed, self._tower = seed, prompt_tower(clip, setup.classnames, params.context_length)
        tower, width = self._tower, pooled(torch.zeros(clip.embed_dim), params.width).numel()
        if width % params.heads:
            share = f"is {width} wide here, which {params.heads} heads cannot share alike"
            raise fb.Unworkable(f"pfedmoap's gate {share}; set pfedmoap.heads or pfedmoap.width otherwise.")
        generator, gate = fb.torch_generator(seed, "pfedmoap gate"), dict[str, Tensor]()
        for name in ("query", "key", "value", "out"):
            gate |= linear_layer(f"gate.{name}", width, width, generator)

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
            features, texts = normalize(inputs, dim=-1), tower.encode(tensors[CONTEXT])
            logits = scaled_logits(features, texts, None, clip.logit_scale)
            if TEXTS in tensors:
                query, values = pooled(features, params.width), torch.cat([texts[None], tensors[TEXTS]])
                mixed = gated(query, pooled(values, params.width), tensors, params.heads, params.sharpness)
                logits = params.local_weight * logits + clip.logit_scale * (mixed * query[:, None]).sum(-1)
            return TextOutputs(logits, features, texts)

        weights = {CONTEXT: initial_context(clip, seed, params.context_length, "random"), **gate}
        rates = dict.fromkeys(gate, params.gate_rate)
        return fb.Model(weights, forward, encoder=clip.image_encoder(), lr_factors=rates)

    @fb.hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """The gate."""
        return [name for name in model.weights if name.startswith("gate.")]

    @fb.wrapper
    def broadcast(self, task: fb.BroadcastTask, rest: Send) -> fb.Broadcast:
        """The stack's, and the experts of a client that has taken part before."""
        sent, pool = rest(task), task.state.get(self.name, {})
        chosen = self._experts(pool, task.client, task.round)
        further = {EXPERTS: torch.stack([pool[other] for other in chosen])} if chosen else {}
        return replace(sent, payload={**sent.payload, **further})

    @fb.hookimpl
    def local_loss(self, step: fb.LocalStep) -> Tensor:
        """Cross-entropy, with experts once there are any."""
        experts, state = step.task.payload.get(EXPERTS), step.task.state
        if experts is not None:
            if self.name not in state:
                state[self.name] = {"texts": self._texts(experts)}
            step.outputs_with({TEXTS: state[self.name]["texts"]})
        return cross_entropy(step)

    @fb.hookimpl
    def after_training(self, task: fb.ClientTask, update: fb.Update) -> None:
        """The next round has other experts."""
        task.state.pop(self.name, None)

    @fb.wrapper
    def aggregate(self, task: fb.AggregationTask, rest: Aggregate) -> Aggregated:
        """The stack's; the clients' prompts are kept."""
        sent = {str(update.client): update.weights[CONTEXT] for update in task.updates}
        task.state[self.name] = {**task.state.get(self.name, {}), **sent}
        return rest(task)

    @fb.hookimpl
    def evaluate(self, task: fb.EvaluationTask) -> fb.Predictions:
        """The global model by P alone; own models by P, the client's gate and its experts."""
        plain, pool = largest_logit(replace(task, clients=(), private=frozenset())), task.state.get(self.name, {})
        texts = {client: self._texts(prompt[None]) for client, prompt in pool.items()} if task.clients else {}

        def own(client: int) -> Tensor:
            weights, buffers = task.own_model(client)
            gate, first = weights["gate.out.weight"], task.model.weights["gate.out.weight"]
            chosen = [] if torch.equal(gate, first.to(gate)) else self._experts(pool, client, 0)  # none before training
            found = {TEXTS: torch.cat([texts[c] for c in chosen])} if chosen else {}
            return predicted_classes(task, weights, {**buffers, **found})

        return replace(plain, by_client={client: own(client) for client in task.clients})

    def _experts(self, pool: fb.Tensors, client: int, round: int) -> list[str]:
        """Whose prompts ``client`` is sent, none where it has sent none itself."""
        others = [other for other in pool if other != str(client)]
        if str(client) not in pool or not others:
            return []
        count = min(self.params.number - 1, len(others))
        if self.params.experts == "random":
            generator = fb.torch_generator(self._seed, "pfedmoap experts", round, client)
            return [others[i] for i in torch.randperm(len(others), generator=generator)[:count].tolist()]
        return [others[i] for i in nearest(pool[str(client)], torch.stack([pool[c] for c in others]), count)]

    @torch.no_grad()
    def _texts(self, prompts: Tensor) -> Tensor:
        """Unit class texts (k, C, d) of ``prompts`` (k, M, d_t)."""
        return torch.stack([self._tower.encode(prompt) for prompt in prompts])

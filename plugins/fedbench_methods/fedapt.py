"""FedAPT - Su, Yang, Li, Xue, "Federated Adaptive Prompt Tuning for Multi-Domain Collaborative Learning", AAAI 2024;
arXiv 2211.07864. (Another method of this name, of 2025, tunes prompts against adversarial examples.)

All clients share a meta prompt p (C, M, d_t), one for every class. Client k, its own domain, reads it through a frozen
random key κ_k ~ U[0, 1) (M, d_t); a query Q (N, d), without bias, learns whose images are whose:
    training:  t_c of p (1 + κ_k);   L = CE(s f·t_c, y) + CE(Q f_raw, k)
    testing:   w = softmax(z(Q f_raw) / τ) for every image, t_c of p (1 + Σ_k w_k κ_k)
f are unit image features, f_raw as they are, z(o) = (o − mean of o) / (standard deviation of o), over the N clients.

Answers: build_model, local_loss, start (refuses more clients than the query has rows). Wraps: broadcast (the key).
Stacks with methods that add terms or aggregate otherwise. p and Q are averaged as the run says; the code counts clients
alike (`weighting=uniform`). Keys are drawn from the run's seed, as every client knows it, and are not sent.
Left open / contradicted: N is the number of clients of the scenario, and a client's number its domain, as in the code;
that suits as many clients as domains (partition=domain), not a hundred. M is 24 in the code by default and 16 in the
name of its log: 16. With one client z is 0/0 in the code, here w is 1. At τ = 0.01 w is nearly one-hot; at that,
`inference=nearest` takes the key of the largest entry of Q f_raw, which needs N text passes in place of one for every
image. `key_scale=0` is class-specific PromptFL and a query that nothing reads.
Cost: C M d_t + N d floats each way; testing by mixed keys encodes all C texts for every image.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as torch_cross_entropy
from torch.nn.functional import linear, normalize

import fedbench.api as fb
from fedbench.api import hyper
from fedbench.models.heads import TextOutputs, clip_of, linear_layer, scaled_logits
from fedbench.models.prompts.context import initial_context, prompt_tower
from fedbench.models.prompts.image_tokens import in_chunks
from fedbench.toolkit.fedavg import cross_entropy
from fedbench.toolkit.wrapping import Send

CONTEXT, QUERY, KEY, NUMBER = "prompt.context", "query.weight", "fedapt.key", "fedapt.number"
SEQUENCES = 512
"""Texts that are encoded at once in testing."""


@dataclass(frozen=True, kw_only=True)
class FedAPTParams:
    """Hyper-parameters of FedAPT."""

    context_length: int = hyper(16, symbol="M", low=1, high=64, search=(4, 24), source="released code: 24, log: 16")
    tau: float = hyper(0.01, symbol="τ", low=1e-3, high=10.0, log=True, source="released code: 0.01")
    key_scale: float = hyper(1.0, symbol="κ", low=0.01, high=2.0, off=0.0, source="released code: U[0, 1)")
    inference: Literal["mixed", "nearest"] = hyper("mixed", symbol="w", source="mixed: released code; nearest: ours")


def key_weights(answers: Tensor, tau: float) -> Tensor:
    """w (b, N) of ``answers`` Q f_raw (b, N)."""
    if answers.shape[1] == 1:
        return torch.ones_like(answers)
    apart = answers - answers.mean(1, keepdim=True)
    return torch.softmax(apart / answers.std(1, keepdim=True).clamp(min=1e-12) / tau, dim=1)


class FedAPT(fb.Method[FedAPTParams]):
    """A meta prompt that each domain reads through a key of its own."""

    name = "fedapt"
    citation = "Su et al., Federated Adaptive Prompt Tuning for Multi-Domain Collaborative Learning, AAAI 2024"
    requires = ("labels", "clip", "context")
    recipe = {"optimizer": "sgd", "lr": 0.01}

    @fb.hookimpl
    def start(self, task: fb.StartTask) -> None:
        """Raises Unworkable where a client would have no key."""
        rows = len(task.model.weights[QUERY])
        if len(task.clients) > rows:
            raise fb.Unworkable(
                f"fedapt has a key for each of {rows} clients (scenario.clients), and the partition makes "
                f"{len(task.clients)}; set scenario.clients to that."
            )

    @fb.hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """p and Q; logits by the key that is among the tensors of a pass, else by keys mixed for every image."""
        clip, params, seed = clip_of(setup), self.params, setup.spec.seed
        context = initial_context(clip, seed, params.context_length, "random", classes=len(setup.classnames))
        tower = prompt_tower(clip, setup.classnames, params.context_length)
        count = setup.spec.scenario.clients
        self._keys = torch.stack([self._key(seed, k, context.shape[1:]) for k in range(count)]).to(setup.spec.device)
        keys, scale, size = self._keys, clip.logit_scale, max(SEQUENCES // tower.num_classes, 1)
        query = linear_layer("query", count, clip.embed_dim, fb.torch_generator(seed, "fedapt query"))[QUERY]

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
            features, prompt = normalize(inputs, dim=-1), tensors[CONTEXT]
            if KEY in tensors:
                texts = tower.encode(prompt * (1 + tensors[KEY]))
                return TextOutputs(scaled_logits(features, texts, None, scale), features, texts)

            def mixed(images: Tensor) -> Tensor:
                weights = key_weights(linear(images, tensors[QUERY]), params.tau)
                own = torch.tensordot(weights, keys, dims=1)
                texts = tower.encode(prompt * (1 + own[:, None]))
                return scale * (texts @ normalize(images, dim=-1)[:, :, None])[:, :, 0]

            if params.inference == "mixed":
                return fb.Outputs(in_chunks(mixed, inputs, size), features)
            of_keys = torch.stack([tower.encode(prompt * (1 + key)) for key in keys])
            chosen = of_keys[linear(inputs, tensors[QUERY]).argmax(1)]
            return fb.Outputs(scale * (chosen @ features[:, :, None])[:, :, 0], features)

        return fb.Model({CONTEXT: context, QUERY: query}, forward, encoder=clip.image_encoder())

    @fb.wrapper
    def broadcast(self, task: fb.BroadcastTask, rest: Send) -> fb.Broadcast:
        """The stack's; the client has its key and its number."""
        sent = rest(task)
        key, number = self._keys[task.client], torch.tensor(task.client, device=self._keys.device)
        return replace(sent, held={**sent.held, KEY: key, NUMBER: number})

    @fb.hookimpl
    def local_loss(self, step: fb.LocalStep) -> Tensor:
        """Cross-entropy of the classes, by the client's key, and of whose images these are."""
        payload, inputs = step.task.payload, step.batch.inputs
        step.outputs_with({KEY: payload[KEY]})
        answers = linear(inputs, step.weights[QUERY])
        return cross_entropy(step) + torch_cross_entropy(answers, payload[NUMBER].expand(len(inputs)))

    def _key(self, seed: int, client: int, shape: torch.Size) -> Tensor:
        return self.params.key_scale * torch.rand(*shape, generator=fb.torch_generator(seed, "fedapt key", client))

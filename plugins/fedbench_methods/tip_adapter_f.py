"""Tip-Adapter-F + FedAvg - Zhang, Zhang, Fang, Gao, Li, Dai, Qiao, Li, "Tip-Adapter: Training-Free Adaption of CLIP for
Few-Shot Classification", ECCV 2022; arXiv 2207.09519; federated by FedAvg, with one key a class.

A cache of image features F (C, d) with their classes as values corrects zero-shot CLIP, and is then trained:
    o_c = s f·t_c + α exp(−β (1 − f·F_c)),   L = CE(o, y)                              (s: CLIP's own scale, frozen)
    at first F_c = m_c / |m_c|,   m_c the mean of f over all samples of class c of all clients
    F ← Σ_i (n_i / Σ_j n_j) F_i
f and t_c are unit features of frozen CLIP, t_c of the run's `templates`. F is not brought to unit length again.

Answers: build_model, survey, report, reported (class means, once, from every client before round 1). Wraps: broadcast
(the first keys). Stacks with losses, server rules and personalisations; a server rule, and a copy of a client's own,
begin at keys of zero, which are zero-shot CLIP, as is the global model before the first aggregation.
Paper against what runs here:
- The paper's cache has a key for every sample of every class. Sent to a server these are the clients' features
  themselves; here there is one a class, their mean, and what clients send is class means and counts.
- The paper's keys average ten augmented views of a sample; here an image is seen as it is. A class that nobody has
  keeps a key of zero, the constant α e^−β.
- The code searches α and β for every data set, and keeps the epoch that is best on the test data; here they are
  hyper-parameters, by default those of the paper's ablation, and the last round counts.
Recipe: the code's AdamW 1e-3, ε 1e-4, with torch's own decay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

import fedbench.api as fb
from fedbench.models.heads import TextOutputs, clip_of, scaled_logits
from fedbench.toolkit.prototypes import class_means, client_features, merged

KEYS = "keys"


@dataclass(frozen=True, kw_only=True)
class TipAdapterParams:
    """Hyper-parameters of Tip-Adapter-F."""

    alpha: float = fb.hyper(1.0, symbol="α", low=0.01, high=50.0, log=True, search=(0.1, 10.0), source="paper")
    beta: float = fb.hyper(5.5, symbol="β", low=0.1, high=50.0, log=True, search=(1.0, 10.0), source="paper")


def cache_logits(features: Tensor, keys: Tensor, beta: float) -> Tensor:
    """exp(−β (1 − f·F_c)), (b, C), of unit ``features`` f (b, d) and ``keys`` F (C, d)."""
    return (-beta * (1 - features @ keys.T)).exp()


class TipAdapterF(fb.Method[TipAdapterParams]):
    """A trained cache of class means beside zero-shot CLIP."""

    name = "tip-adapter-f"
    citation = "Zhang et al., Tip-Adapter: Training-Free Adaption of CLIP for Few-Shot Classification, ECCV 2022"
    requires = ("labels", "clip", "whole_model")
    recipe = {"optimizer": "adamw", "lr": 1e-3, "eps": 1e-4, "weight_decay": 1e-2}

    @fb.hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """The keys, zero until clients have reported; logits by texts and cache."""
        clip, params = clip_of(setup), self.params
        texts = clip.text_features(setup.classnames, setup.spec.templates)

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
            features = normalize(inputs, dim=-1)
            known = scaled_logits(features, texts, None, clip.logit_scale)
            logits = known + params.alpha * cache_logits(features, tensors[KEYS], params.beta)
            return TextOutputs(logits, features, texts)

        return fb.Model({KEYS: torch.zeros(texts.shape)}, forward, encoder=clip.image_encoder())

    @fb.hookimpl
    def survey(self, round: int, spec: fb.RunSpec, state: Mapping[str, fb.Tensors]) -> str:
        """Everyone before round 1."""
        return "everyone" if round == 1 else "nobody"

    @fb.hookimpl
    def report(self, task: fb.ClientTask) -> fb.Tensors:
        """The mean feature of each class the client has, and its counts."""
        features = client_features(task, task.received, task.buffers)
        return {"means": class_means(features, task.visible_labels).means, "counts": task.visible_counts}

    @fb.hookimpl
    def reported(self, task: fb.ReportedTask) -> None:
        """The first keys."""
        task.state[self.name] = {KEYS: normalize(merged(task.reports.values()), dim=-1)}

    @fb.wrapper
    def broadcast(self, task: fb.BroadcastTask, rest: Callable[[fb.BroadcastTask], fb.Broadcast]) -> fb.Broadcast:
        """What the stack sends, with the first keys in place of zeros."""
        answer = rest(task)
        first = task.state.get(self.name, {}).get(KEYS)
        if first is None or bool(answer.weights[KEYS].any()):
            return answer
        return replace(answer, weights={**answer.weights, KEYS: first})

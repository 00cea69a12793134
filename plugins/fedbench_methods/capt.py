"""CAPT - Hou, Shang, Gowda, Lu, Wu, Yan, Wang, "CAPT: Class-Aware Prompt Tuning for Federated
Long-Tailed Learning with Vision-Language Model", arXiv 2503.06993, 2025; code: shihaohou/CAPT, commit 840b7cab.

A general token p_g (1, d), class tokens p_c (K, 3, d) and a coupling F are trained; CLIP is frozen. u(x) = x / |x|;
π are the class shares of all clients, T = 0.1, s CLIP's scale.
    t_k = g([p_g; p_c,k; name_k]),  f = f(x, F p_g), one text a class and one token behind the patches     (capt.py)
    L_g = −mean_bm log [exp(f_b·u(p_g,m) / T) / Σ_b'm' exp(f_b'·u(p_g,m') / T)], without labels     (prompt_loss.py)
    L_c = −mean_b log softmax_y(f_b·mean_m u(p_c,k,m) / T + log π),   L_a = −mean_b log softmax_y(s f_b·t_k + log π)
    L = L_g + L_c + L_a;   prediction by s f·t_k
The cohort trains in turn on one model (`in-turn`). A global mean is due in every a-th round, of this cohort alone; till
then that model goes on, and the server's stays as it was                                       (federated_main.py)
    1. p_c is averaged inside 4 clusters by k-means on the rows of 1 − JS(p_i, p_j), p_g inside 4 complete-linkage
       clusters at the distance 1 − C / max C, C_ij = 1 − ⟨p_i, p_j⟩, with p_i the class shares of client i
    2. p_c,k is the plain mean over clients with p_i(k) > 0.1, else the server's old one; the rest by samples
`scheduler=bandit` draws a from {1, 2, 3, 5, 7, 10}, by ε-greedy on Q/n + √(2 ln(N + 1) / n), n being n + 1e-5; after a
mean Q ← Q + 0.1 · 0.95^(t − 1) (r − Q), r = 0.6 accuracy + 0.3 F1 + 0.1 (accuracy − that of four means ago) / 5, in
percent. By default a is 1.

Answers: build_model, start, turns, broadcast, local_loss, aggregate. `capt-reconstructed` is read from the paper alone.
Paper against code: L_a is in the code alone. Only the true class's prompt is to be updated; the code masks gradients
after the step, which does nothing. The code sums C over head and tail classes apart; that is over all: 1 − ⟨p_i, p_j⟩.
Contradicted here:
- The code takes r on the test data. Here r is of labelled samples at the server (`scenario.server_samples`), which no
  client trains on and which the bandit needs. Three more arms that the code draws are used for nothing, but move the
  bandit, and so they do here.
- The code keeps the optimiser's momentum from client to client; here it begins anew with each.
- Where d differs between towers (RN50; the embedded CLIP), tokens in L_g and L_c pass through g's last projection. The
  code's RN50 form of F is not here: `capt.vl_align=off`.
Cost: one text a class is encoded in every step; clients train one after another, and send in every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

import fedbench.api as fb
from fedbench.api import FedbenchError, hookimpl, hyper
from fedbench.models.heads import clip_of, scaled_logits
from fedbench.models.prompts.context import random_context
from fedbench.models.prompts.image_tokens import require_vision_transformer
from fedbench.toolkit.fedavg import average, participant_shares, predicted_classes, weighted_mean
from fedbench.toolkit.losses import adjusted, class_prior, mean_cross_entropy
from fedbench.toolkit.server_training import granted
from fedbench_methods.shared.bandit import draw, earned, points
from fedbench_methods.shared.clients import drawn_order
from fedbench_methods.shared.clustering import (
    class_shares,
    complementary_groups,
    means_inside,
    similar_clients,
    weighted_means,
)
from fedbench_methods.shared.prompted_clip import PromptedClip, coupling, prompted, prompted_clip

GENERAL, OF_CLASS = "prompt.general", "prompt.class"
ARMS, DRAWN = (1, 2, 3, 5, 7, 10), 4


@dataclass(frozen=True, kw_only=True)
class CaptParams:
    """Hyper-parameters of CAPT."""

    general_length: int = hyper(1, symbol="M", low=1, high=32, search=False, source="released script: 1")
    class_length: int = hyper(3, symbol="m", low=1, high=32, search=(1, 8), source="released script: 4 in all")
    general_loss: float = hyper(1.0, symbol="L_g", low=0.01, high=10.0, log=True, off=0.0, source="released code: 1")
    class_loss: float = hyper(1.0, symbol="L_c", low=0.01, high=10.0, log=True, off=0.0, source="released code: 1")
    main: Literal["adjusted", "plain", "off"] = hyper(
        "adjusted", symbol="L_a", source="released code; plain: without log π; off: without L_a"
    )
    temperature: float = hyper(0.1, symbol="T", low=0.01, high=1.0, log=True, search=False, source="released code: 0.1")
    vl_align: bool = hyper(True, symbol="F", source="Eq. 3; released code")
    clustering: bool = hyper(True, symbol="clusters", source="released code")
    clusters: int = hyper(4, symbol="k", low=1, high=20, search=False, source="released script: 4 and 4")
    least_share: float = hyper(0.1, symbol="p_i(k)", low=0.0, high=1.0, search=False, source="released code: 0.1")
    in_turn: bool = hyper(True, symbol="in turn", source="released code; off: from the server's model, a mean a round")
    scheduler: Literal["fixed", "bandit"] = hyper("fixed", symbol="a", source="released code: bandit, on test data")
    period: int = hyper(1, symbol="a", low=1, high=10, search=False, source="fixed: rounds to a global mean")


def general_loss(images: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """L_g, a scalar, of unit ``images`` f (b, d) and ``tokens`` p_g (M, d)."""
    return -torch.log_softmax((images @ normalize(tokens, dim=-1).T / temperature).flatten(), dim=0).mean()


def class_loss(images: Tensor, tokens: Tensor, labels: Tensor, prior: Tensor, temperature: float) -> Tensor:
    """L_c, a scalar, of unit ``images`` f (b, d), ``tokens`` p_c (K, m, d), ``labels`` (b,) and ``prior`` π (K,)."""
    means = normalize(tokens, dim=-1).mean(dim=1)
    return mean_cross_entropy(adjusted(images @ means.T / temperature, prior), labels)


class CAPT(fb.Method[CaptParams]):
    """General and class-aware prompts as the released code trains them, clients in turn."""

    name = "capt"
    citation = "Hou et al., CAPT: Class-Aware Prompt Tuning for Federated Long-Tailed Learning, 2025"
    recipe = {"optimizer": "sgd", "lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}
    requires: tuple[str, ...] = ("labels", "clip", "context", "whole_model")
    prevents = ("sent_start", "global_model")

    def __init__(self, params: CaptParams) -> None:
        super().__init__(params)
        if params.main == "off" and not params.general_loss and not params.class_loss:
            raise FedbenchError("capt without any of its three losses trains nothing; leave one on.")
        if not params.in_turn and (params.period > 1 or params.scheduler == "bandit"):
            raise FedbenchError("capt without in_turn makes a mean in every round; set neither period nor scheduler.")
        if params.period > 1 and params.scheduler == "bandit":
            raise FedbenchError("capt.scheduler=bandit draws the rounds to a mean; leave capt.period out.")
        if params.scheduler == "bandit":
            self.requires = (*self.requires, "server_labels")

    @hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """The prompts, and with `vl_align` their coupling to the image tower."""
        clip, params, names, seed = clip_of(setup), self.params, setup.classnames, setup.spec.seed
        general = random_context(seed, "context", params.general_length, clip.text.width)
        of_class = random_context(seed, "contexts of classes", len(names), params.class_length, clip.text.width)
        weights, blocks = {GENERAL: general, OF_CLASS: of_class}, {"both": (GENERAL, OF_CLASS)}
        if not params.vl_align:
            model = prompted_clip(clip, names, blocks, weights, "both")
            return fb.Model(weights=weights, forward=model, encoder=clip.image_encoder())
        visual = require_vision_transformer(clip, "capt appends a token to the image tower", "capt.vl_align=off")
        model = prompted_clip(clip, names, blocks, weights, "both", visual)
        weights |= coupling(clip.text.width, visual.width, seed)
        return fb.Model(weights=weights, forward=model, transform=clip.transform)

    @hookimpl
    def start(self, task: fb.StartTask) -> fb.Tensors:
        """Label counts go up once."""
        counts, arms = task.class_counts, len(ARMS)
        state = {"counts": counts, "prior": class_prior(counts)}
        state |= {"values": torch.zeros(arms).double(), "plays": torch.zeros(arms).double()}
        task.state[self.name] = state | {"accuracies": torch.zeros(0).double()}
        return {"class_counts": counts}

    @hookimpl
    def turns(self, clients: tuple[int, ...], round: int, spec: fb.RunSpec) -> Sequence[int] | None:
        """An order drawn anew every round."""
        return drawn_order(clients, round, spec.seed) if self.params.in_turn else None

    @hookimpl
    def broadcast(self, task: fb.BroadcastTask) -> fb.Broadcast:
        """The model that goes on, and π."""
        state = task.state[self.name]
        going = {name: state.get(f"going.{name}", weight) for name, weight in task.weights.items()}
        return fb.Broadcast(going, {"prior": state["prior"]})

    @hookimpl
    def local_loss(self, step: fb.LocalStep) -> Tensor:
        """L on one pass of the images."""
        model, params, labels, weights = prompted(step.model.forward, self.name), self.params, step.labels, step.weights
        images, prior = model.images(weights, step.batch.inputs), step.task.payload["prior"]
        terms = []
        if params.general_loss:
            tokens = self._in_feature_space(weights[GENERAL], model, images)
            terms.append(params.general_loss * general_loss(images, tokens, params.temperature))
        if params.class_loss:
            tokens = self._in_feature_space(weights[OF_CLASS], model, images)
            terms.append(params.class_loss * class_loss(images, tokens, labels, prior, params.temperature))
        if params.main != "off":
            logits = scaled_logits(images, model.texts("both", weights), None, model.scale)
            logits = adjusted(logits, prior) if params.main == "adjusted" else logits
            terms.append(mean_cross_entropy(logits, labels))
        return torch.stack(terms).sum()

    @hookimpl
    def aggregate(self, task: fb.AggregationTask) -> fb.Tensors:
        """A global mean where one is due; else the last client's model goes on, and the server's stays."""
        state, params = dict(task.state[self.name]), self.params
        generator = task.generator("capt-bandit")
        # four arms are drawn, of which the last one counts
        bandit = params.scheduler == "bandit"
        arms = draw(state["values"].cpu(), state["plays"].cpu(), DRAWN, generator) if bandit else []
        period = ARMS[arms[-1]] if arms else params.period
        if params.in_turn and (task.round - 1) % period:
            arrived = {update.client: update.weights for update in task.updates}
            last = arrived[drawn_order(arrived, task.round, task.spec.seed)[-1]]
            task.state[self.name] = state | {f"going.{name}": weight for name, weight in last.items()}
            return dict(task.weights)
        weights = self._mean(task, state["counts"].cpu())
        if arms:
            state |= self._rewarded(task, state, weights, arms)
        task.state[self.name] = {name: value for name, value in state.items() if not name.startswith("going.")}
        return weights

    def _mean(self, task: fb.AggregationTask, counts: Tensor) -> fb.Tensors:
        """Steps 1 and 2, of all clients' ``counts`` (N, K)."""
        params, weights = self.params, average(task)
        counts = counts[[update.client for update in task.updates]]
        shares = class_shares(counts)
        general, of_class = ([update.weights[name] for update in task.updates] for name in (GENERAL, OF_CLASS))
        if params.clustering:
            alike = similar_clients(counts, "js", params.clusters, "kmeans", task.spec.seed)
            of_class = means_inside(of_class, alike.tolist())
            general = means_inside(general, complementary_groups(shares, params.clusters))
        held = (shares > params.least_share).double()
        weights[OF_CLASS] = weighted_means(of_class, held, task.weights[OF_CLASS])
        weights[GENERAL] = weighted_mean(general, participant_shares(task.updates, task.spec.training.weighting))
        return weights

    def _rewarded(
        self, task: fb.AggregationTask, state: fb.Tensors, weights: fb.Tensors, arms: Sequence[int]
    ) -> fb.Tensors:
        """The bandit after the mean ``weights``: ``arms`` earn what the model scores on the server's samples."""
        from sklearn.metrics import f1_score

        server = granted(task)
        assert server.labels is not None, "the harness grants what `requires` names"
        asked = fb.EvaluationTask(task.model, weights, task.buffers, server.inputs, len(state["prior"]))
        labels, answer = server.labels.cpu(), predicted_classes(asked, weights, task.buffers).cpu()
        accuracies = torch.cat([state["accuracies"].cpu(), 100 * (answer == labels).double().mean()[None]])
        f1 = f1_score(labels, answer, labels=sorted(set(labels.tolist())), average="macro")
        reward = points(accuracies.tolist(), 100 * float(f1))
        after = earned(state["values"].cpu(), state["plays"].cpu(), arms, reward, task.round)
        return {**after, "accuracies": accuracies}

    @staticmethod
    def _in_feature_space(tokens: Tensor, model: PromptedClip, images: Tensor) -> Tensor:
        """``tokens`` (..., d_t) as (..., d), as they are where the widths are one."""
        return tokens if tokens.shape[-1] == images.shape[-1] else model.towers["both"].text.project(tokens)

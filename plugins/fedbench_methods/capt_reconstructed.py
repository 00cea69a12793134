"""CAPT, reconstructed form - Hou, Shang, Gowda, Lu, Wu, Yan, Wang, "CAPT: Class-Aware Prompt Tuning for Federated
Long-Tailed Learning with Vision-Language Model", arXiv 2503.06993, 2025.

A general prompt P_g (M, d_t), a prompt of each class P_c (K, m, d_t) and a coupling F are trained; CLIP is frozen.
    t^g_k = g([P_g; name_k]),  t^c_k = g([P_c,k; name_k]),  f_x = f(x, V),  all unit vectors
    L_g = −log softmax_y(s f_x·t^g)                                                                       (Eq. 1)
    L_c = −log softmax_y(s f_x·t^c + log π), where only t^c_y has a gradient                              (Eq. 2)
    V = F(P_g) = W P_g + b, tokens behind the image patches                                               (Eq. 3)
    L = L_g + λ L_c;  prediction by t_k = g([P_g; P_c,k; name_k])                                         (Eq. 4)
    JS(p_i, p_j) → k-means on the rows of 1 − JS: clusters inside which P_c is averaged                   (Eq. 5)
    C_ij = h_i t_j + t_i h_j from head and tail shares: clusters inside which P_g is averaged             (Eq. 6)
    Q(a) ← Q(a) + (r − Q(a)) / N(a);  ε-greedy on Q(a) + c √(ln(t+1) / (N(a)+1))                          (Eqs. 7, 8)

Answers: build_model, start, exchanges, broadcast, local_loss, aggregate. Stacks with methods that add loss terms.
This form is reconstructed from the paper, whose text at hand lacks the formulas; `capt` is what the published
code does, which differs in every loss. The prose fixes
λ = 1, π_k = N_k / N, that only the true class's prompt is updated, JS, k-means, and what is averaged where. The rest:
- The bandit: 1/N(a), ε, c; arms {1, 2, 3} exchanges a round × {1, 2, 5} rounds between global means; r = relative fall
  of the mean training loss − κ bytes / most bytes. More exchanges also train more.
- `het_cluster=balanced` deals clients in turn by tail share; `literal`, k-means on the rows of C, gathers like ones,
  the opposite of the stated aim. Head and tail: 75 / 95 % of all that is reported (appendix B).
- L_c reads t_k (`loss_on=integrated`), other classes' constant. With `parts`: 52 to 58 % on the embedded long tail
  (zero-shot CLIP: 68). F is averaged over all, global prompts over clusters by samples, taken over at a global mean.
SGD at 1e-3 is the paper's; decay would move prompts of absent classes. `vl_align=off` makes features cacheable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

import fedbench.api as fb
from fedbench.api import FedbenchError, hookimpl, hyper
from fedbench.models.heads import clip_of, scaled_logits
from fedbench.models.prompts.context import Init, initial_context
from fedbench.models.prompts.image_tokens import require_vision_transformer
from fedbench.toolkit.fedavg import average
from fedbench_methods.shared import clustering as grouping
from fedbench_methods.shared.bandit import Pace, mean_loss
from fedbench_methods.shared.prompted_clip import coupling, prompted, prompted_clip

ARMS = tuple((exchanges, rounds) for exchanges in (1, 2, 3) for rounds in (1, 2, 5))
BLOCKS = {"general": ("prompt.general",), "class": ("prompt.class",), "both": ("prompt.general", "prompt.class")}
DRAWN, GROUPED = {"init": ("random",)}, {"clustering": (True,)}
GENERAL, OF_CLASS = {**DRAWN, "prompts": ("both", "general")}, {**DRAWN, "prompts": ("both", "class")}


@dataclass(frozen=True, kw_only=True)
class ReconstructedParams:
    """Hyper-parameters of CAPT's reconstructed form."""

    context_length: int = hyper(4, symbol="M", low=1, high=32, search=(1, 8), when=GENERAL, source="appendix B")
    class_length: int = hyper(4, symbol="m", low=1, high=32, search=(1, 8), when=OF_CLASS, source="reconst.: as M")
    init: Init = hyper("random", symbol="P⁰", source="section 3.1 names both")
    balance: float = hyper(1.0, symbol="λ", low=0.01, high=10.0, log=True, off=0.0, source="Eq. 4; section 4.1: 1")
    loss_on: Literal["parts", "integrated"] = hyper("integrated", symbol="t in L_c", source="reconstruction")
    prompts: str = hyper("both", symbol="P_g, P_c", choices=tuple(BLOCKS), source="Table 4")
    vl_align: bool = hyper(True, symbol="F", source="Eq. 3, as MaPLe; Table 5")
    clustering: bool = hyper(True, symbol="clusters", source="section 3.3; Table 4")
    similar_clusters: int = hyper(3, symbol="k_s", low=1, high=20, search=(1, 6), when=GROUPED, source="section 4.1: 3")
    complementary_clusters: int = hyper(3, symbol="k_h", low=1, high=20, search=(1, 6), when=GROUPED, source="Fig 6: 4")
    similarity: grouping.Similarity = hyper("js", symbol="S", source="Eq. 5; Table 8")
    algorithm: grouping.Algorithm = hyper("kmeans", symbol="clusterer", source="Table 9")
    het_cluster: Literal["balanced", "literal"] = hyper("balanced", symbol="C_ij", source="Eq. 6, see above")
    class_weighting: Literal["samples", "class_counts"] = hyper("samples", symbol="n_i", source="n_i,k for P_c,k")
    scheduler: Literal["bandit", "fixed"] = hyper("bandit", symbol="MAB", source="Table 5; fixed: arm (1, 1)")
    epsilon: float = hyper(0.1, symbol="ε", low=0.0, high=1.0, search=False, source="Eq. 8; value: reconstruction")
    bonus: float = hyper(0.5, symbol="c", low=0.0, high=2.0, search=False, source="Eq. 8; value: reconstruction")
    cost: float = hyper(0.01, symbol="κ", low=0.0, high=1.0, search=False, source="reconstruction")


def class_aware_loss(images: Tensor, texts: Tensor, labels: Tensor, prior: Tensor, scale: float) -> Tensor:
    """L_c (Eq. 2), a scalar, of unit ``images`` f_x (B, d), ``texts`` t (K, d), ``labels`` (B,), ``prior`` π (K,)."""
    # a sample moves the text of its own class only; log 0 = −∞ leaves out classes that nobody has
    own = one_hot(labels, len(texts)).bool()
    cosines = torch.where(own, images @ texts.T, images @ texts.detach().T)
    return cross_entropy(scale * cosines + prior.log(), labels)


class CaptReconstructed(fb.Method[ReconstructedParams]):
    """General and class-aware prompts as the paper's prose has them, averaged inside clusters of clients."""

    name = "capt-reconstructed"
    citation = "Hou et al., CAPT: Class-Aware Prompt Tuning for Federated Long-Tailed Learning, 2025"
    recipe = {"optimizer": "sgd", "lr": 1e-3, "weight_decay": 0.0}
    requires = ("labels", "clip", "context", "whole_model")
    prevents = ("sent_start", "global_model")

    @hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """The prompts, and with `vl_align` their coupling to the image tower (Eq. 3)."""
        clip, params, names, seed = clip_of(setup), self.params, setup.classnames, setup.spec.seed
        general = initial_context(clip, seed, params.context_length, params.init)
        of_class = initial_context(clip, seed, params.class_length, params.init, classes=len(names))
        drawn = {"prompt.general": general, "prompt.class": of_class}
        weights = {name: drawn[name] for name in BLOCKS[params.prompts]}
        if not params.vl_align:
            model = prompted_clip(clip, names, BLOCKS, weights, params.prompts, None)
            return fb.Model(weights=weights, forward=model, encoder=clip.image_encoder())
        remedy = f"{self.name}.vl_align=off"
        if params.prompts == "class":
            raise FedbenchError(f"{self.name}.prompts=class has nothing to couple with images; set {remedy}.")
        visual = require_vision_transformer(clip, f"{self.name} appends tokens to the image tower", remedy)
        model = prompted_clip(clip, names, BLOCKS, weights, params.prompts, visual)
        weights |= coupling(general.shape[-1], visual.width, seed)
        return fb.Model(weights=weights, forward=model, transform=clip.transform)

    @hookimpl
    def start(self, task: fb.StartTask) -> fb.Tensors:
        """Label counts go up once; prior and clusters follow from them (Eqs. 2, 5, 6)."""
        counts, params = task.class_counts, self.params
        state = {"prior": counts.sum(dim=0).float() / counts.sum()}
        state |= self._pace.begin(task.generator("capt-bandit", 1))
        for name in BLOCKS[params.prompts]:
            by_class = name == "prompt.class" and params.class_weighting == "class_counts"
            weighting = params.class_weighting if by_class else task.spec.training.weighting
            state[f"{name}.held"] = grouping.client_weights(counts, weighting)
            state[f"{name}.clusters"] = clusters = self._clusters(name, counts, task.spec.seed)
            state[name] = torch.stack([task.model.weights[name].to(task.spec.device)] * (int(clusters.max()) + 1))
        task.state[self.name] = state
        return {"class_counts": counts}

    @hookimpl
    def exchanges(self, round: int, spec: fb.RunSpec, state: Mapping[str, fb.Tensors]) -> int:
        """Iterations inside clusters, of the arm in play."""
        return self._pace.exchanges(state[self.name])

    @hookimpl
    def broadcast(self, task: fb.BroadcastTask) -> fb.Broadcast:
        """The prompts of the client's two clusters, the coupling, and the global prior."""
        state, names = task.state[self.name], BLOCKS[self.params.prompts]
        own = {name: state[name][state[f"{name}.clusters"][task.client]] for name in names}
        return fb.Broadcast({**task.weights, **own}, {"prior": state["prior"]})

    @hookimpl
    def local_loss(self, step: fb.LocalStep) -> Tensor:
        """L_g + λ L_c (Eqs. 1, 2, 4) on one pass of the images."""
        model, params, labels, terms = prompted(step.model.forward, self.name), self.params, step.labels, []
        images = model.images(step.weights, step.batch.inputs)
        if params.prompts != "class":
            logits = scaled_logits(images, model.texts("general", step.weights), None, model.scale)
            terms.append(cross_entropy(logits, labels))
        if params.prompts != "general":
            texts = model.texts("class" if params.loss_on == "parts" else params.prompts, step.weights)
            prior = step.task.payload["prior"].to(images.device)
            terms.append(params.balance * class_aware_loss(images, texts, labels, prior, model.scale))
        return torch.stack(terms).sum()

    @hookimpl
    def aggregate(self, task: fb.AggregationTask) -> fb.Tensors:
        """Means inside clusters, their mean as global weights; a round's last exchange earns the arm its reward."""
        weights, state, names = average(task), dict(task.state[self.name]), BLOCKS[self.params.prompts]
        for name in names:
            how = ([update.client for update in task.updates], state[f"{name}.clusters"], state[f"{name}.held"])
            values = [update.weights[name] for update in task.updates]
            state[name], weights[name] = grouping.clustered_average(state[name], values, *how)
        if task.exchange + 1 == task.exchanges:
            generator = fb.torch_generator(task.spec.seed, "capt-bandit", task.round + 1)
            ended, is_due = self._pace.end_round(state, mean_loss(task.updates), generator)
            state |= ended | {n: weights[n].expand_as(state[n]).clone() for n in names if is_due}
        task.state[self.name] = state
        return weights

    @property
    def _pace(self) -> Pace:
        arms = ARMS if self.params.scheduler == "bandit" else ARMS[:1]
        return Pace(arms, self.params.epsilon, self.params.bonus, self.params.cost)

    def _clusters(self, name: str, counts: Tensor, seed: int) -> Tensor:
        """Each client's cluster (N,): like class shares for P_c (Eq. 5), head beside tail for P_g (Eq. 6)."""
        params = self.params
        if not params.clustering:
            return torch.zeros(len(counts), dtype=torch.int64)
        if name == "prompt.class":
            return grouping.similar_clients(counts, params.similarity, params.similar_clusters, params.algorithm, seed)
        rule, count = params.algorithm if params.het_cluster == "literal" else None, params.complementary_clusters
        return grouping.complementary_clients(counts, count, rule, seed)

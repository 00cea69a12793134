"""FlexLoRA - Bai, Chen, Qian, Yao, Li, "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and
Client Resources", NeurIPS 2024; arXiv 2402.11505.

The server averages the products of every low-rank addition γ B A and takes the best approximation of the clients' rank:
    Σ_i p_i B_i A_i = U S Vᵀ;    B ← U_r S_r,   A ← V_rᵀ

Wraps: build_model (only to refuse a model without such factors), aggregate, of whose answer it replaces the factors.
Stacks on a learner with such factors (clip-lora+flexlora), of which it knows the names `*.A` and `*.B`, with methods
that change losses, and with server steps (momentum then goes along the factors). Not where factors stay with clients.
What it loses of the mean is what lies beyond rank r; stacked with fedex-lora that is not lost but goes into W₀.
Left open / contradicted: here all clients have one rank; the paper's are sent the leading r_i. The released code puts
all of S into B, up to the factor γ that its products have; with `split=root` either factor has √S, which gives other
gradients in the next round: that is what clip-lora.lora_agg=product_svd does, bit for bit. The signs of singular
vectors are those that the decomposition happens to give. Sent are 2 r w floats a projection, as without.
"""

from __future__ import annotations

from dataclasses import dataclass

import fedbench.api as fb
from fedbench.toolkit.fedavg import participant_shares
from fedbench.toolkit.low_rank import Split, pairs_of, product_mean, sent_factors
from fedbench.toolkit.wrapping import Aggregate, Aggregated, Build, weights_of, with_weights


@dataclass(frozen=True, kw_only=True)
class FlexLoRAParams:
    """Hyper-parameters of FlexLoRA."""

    split: Split = fb.hyper("left", symbol="S", source="of the singular values; left, all in B: the released code")


class FlexLoRA(fb.Method[FlexLoRAParams]):
    """Averages the products of low-rank additions, cut to their rank."""

    name = "flexlora"
    citation = "Bai et al., Federated Fine-tuning of LLMs under Heterogeneous Tasks and Client Resources, NeurIPS 2024"
    role = "aggregation"
    requires = ("whole_model", "kept_factors", "own_updates")
    needs_learner = "clip-lora"

    @fb.wrapper
    def build_model(self, setup: fb.ModelSetup, rest: Build) -> fb.Model:
        """The learner's model as it is. Raises Unworkable for one without low-rank factors."""
        model = rest(setup)
        pairs_of(model.weights, self.name)
        return model

    @fb.wrapper
    def aggregate(self, task: fb.AggregationTask, rest: Aggregate) -> Aggregated:
        """The stack's answer with the factors of the mean product."""
        answer, shares = rest(task), participant_shares(task.updates, task.spec.training.weighting)
        factors: fb.Tensors = {}
        for name in pairs_of(task.weights, self.name):
            a, b = sent_factors(task.updates, name)
            factors[f"{name}.A"], factors[f"{name}.B"] = product_mean(a, b, shares.to(a[0]), self.params.split)
        return with_weights(answer, {**weights_of(answer), **factors})

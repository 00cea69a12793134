"""CReFF - Shang, Lu, Huang, Wang, "Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training
with Federated Features", IJCAI 2022. Equations are numbered as in CLIP2FL (AAAI 2024), which restates them.

    g_c^k = mean over the client's samples of class c of the gradient of CE w.r.t. the head φ̂^t    (Eq. 3)
    g_c = mean over the clients that own c, unweighted;   w^{t+1} = Σ_k (n_k / Σ_j n_j) w_k        (Eqs. 4, 9)
    V_c: m features a class, drawn from N(0, 1) once, kept; g_c^v their gradient in closed form    (Eq. 5)
    V ← V − lr ∇ Σ_c D(g_c^v, g_c), match_steps times, over the classes of the round               (Eq. 6)
    φ̂^{t+1}: a head trained on V with its labels, as many of each class                            (Eq. 10)
Evaluated is the global backbone with φ̂^{t+1}; clients train from the global head as under FedAvg, bit for bit.

Answers: start, broadcast, after_training, aggregate, evaluate. Stacks with methods that change the local loss only.
Needs a model with a linear head (`Model.head`). On frozen CLIP features the backbone is fixed, so what clients train
does not reach the evaluation, only φ̂ does, unless it starts from their head (head_start=global). With
retrain_epochs=0 and head_start=global it is FedAvg.
Equations against released code, and what was left open: Eq. 6 is the mean over the weight's rows; the code sums them
and adds the bias as one row more (default; `gradient_form=paper` is the other, whose gradient is C times the smaller:
with it, lr_feature C times as large). Eq. 10 goes on from φ̂^t (`head_start=warm`), the sentence before it from the
global head (`global`), the code from a new head each round (default); φ̂^1 is the model's own first head, in the code
another random one. Algorithm 1 reads as gradients of the updated extractor, the code takes the received one (default).
The code re-trains for 300 epochs at lr 0.01, here it is 30 at 0.1; what that costs stands with the defaults in
`shared/federated_features.py`. The code's augmentation reseeds torch from the clock; here all draws follow the run's
seed. Features of a class that no client of the round owns stay as they are; until it is first seen they are noise,
which re-training includes, as in the code. Privacy: clients send which classes they own, and the gradient of a single
sample gives its feature away.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedbench.api import AggregationTask, Method, Tensors, hookimpl, hyper
from fedbench_methods.shared.federated_features import (
    FeatureParams,
    FederatedFeatures,
    GradientForm,
    HeadStart,
    RetrainedHead,
)


@dataclass(frozen=True, kw_only=True)
class CReFFParams(FeatureParams):
    """Hyper-parameters of CReFF."""

    gradient_form: GradientForm = hyper(
        "official",
        symbol="D",
        source="official: rows summed, the bias one more (released code); paper: mean over rows, no bias (Eq. 6)",
    )
    head_start: HeadStart = hyper(
        "fresh",
        symbol="φ̂",
        neutral="global",
        source="fresh: released code; warm: Eq. 10, from the last one; global: from the FedAvg head",
    )


class CReFF(RetrainedHead, Method[CReFFParams]):
    """Re-trains the classifier on federated features learned by gradient matching."""

    name = "creff"
    citation = "Shang et al., Classifier Re-Training with Federated Features, IJCAI 2022"
    requires = ("labels", "linear_head", "sent_head")

    def __init__(self, params: CReFFParams) -> None:
        super().__init__(params)
        self.federated = FederatedFeatures(self.name, params, params.gradient_form, params.head_start)

    @hookimpl
    def aggregate(self, task: AggregationTask) -> Tensors:
        """The mean of the weights (Eq. 9); features matched to the gradients, the head re-trained (Eqs. 4-6, 10)."""
        return self.federated.aggregate(task)

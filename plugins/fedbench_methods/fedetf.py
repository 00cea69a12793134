"""FedETF - Li, Shang, He, Lin, Wu, "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with
Synthetic and Fixed Classifier", ICCV 2023.

The classifier is fixed at what neural collapse ends in, a simplex equiangular tight frame, for all clients alike; body,
a projection Π of its features f and a temperature b are trained, by a softmax balanced over the client's classes:
    P = √(C/(C−1)) U (I − 11ᵀ/C),   U orthonormal:   P_c·P_c' = −1/(C−1), P_c·P_c = 1
    z = Π f + π,     o_c = b ⟨z/‖z‖, P_c⟩,     L = CE(o + log n_k),   n_k the client's samples by class

Answers: build_model, local_loss. Stacks with methods that add loss terms or aggregate otherwise, and with
personalisations around it; `features` are z/‖z‖. Predictions use o. On frozen CLIP features Π and b are all that is
trained. Compare `fedloge`, whose fixed classifier is sparse, and `fedglcl`, whose fixed one is of texts.
Left open / contradicted: released code has z of C entries whatever the features; `width=features` keeps their width,
which C − 1 must not exceed. It draws U from the QR of uniform numbers of numpy's generator; here from the run's seed.
b starts at one there and here. A client's classes without samples count 1e-8. Its fine-tuning of P and Π in turn, after
the last round, is not here: finetune_epochs trains body, Π and b on.
Cost: FedAvg's bytes with Π (C d + C floats, as many as a head) and b in place of the head. P follows from the seed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.models.heads import default_model, linear_layer
from fedbench.models.text.classifier import unit
from fedbench.toolkit.losses import balance, mean_cross_entropy
from fedbench_methods.shared.etf import simplex

CLASSIFIER, SCALE = "etf", "projection.scale"


@dataclass(frozen=True, kw_only=True)
class FedEtfParams:
    """Hyper-parameters of FedETF."""

    width: Literal["classes", "features"] = fb.hyper(
        "classes", symbol="d", source="released code; features: as wide as f"
    )
    scale: float = fb.hyper(
        1.0, symbol="b", low=0.1, high=100.0, log=True, search=(0.5, 30.0), source="released code: 1 at first"
    )


def etf_logits(embedding: Tensor, classifier: Tensor, scale: Tensor) -> Tensor:
    """o, (batch, C), from z/‖z‖ (batch, d), P (C, d) and b."""
    return scale * (embedding @ classifier.T)


class FedETF(fb.Method[FedEtfParams]):
    """A fixed equiangular classifier on projected features."""

    name = "fedetf"
    citation = "Li et al., No Fear of Classifier Biases: Neural Collapse Inspired FL, ICCV 2023"
    requires = ("labels",)
    reads = ("tune",)

    @fb.hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """The default model with a projection and b in place of its head."""
        model, classes = default_model(setup), len(setup.classnames)
        head = model.linear_head
        features = model.weights[head.weight].shape[1]
        width = features if self.params.width == "features" else classes
        if width < classes - 1:
            raise fb.FedbenchError(
                f"{classes} classes at equal angles need features of width {classes - 1} or more, and this backbone "
                f"has {width}; choose a wider backbone, or fedetf.width=classes."
            )
        classifier = simplex(classes, width, setup.generator("etf")).float()
        constants = {name: model.weights[name].to(setup.spec.device) for name in head.names}
        constants[CLASSIFIER] = classifier.to(setup.spec.device)
        projection = linear_layer("projection", width, features, setup.generator("projection"))
        body = {name: value for name, value in model.weights.items() if name not in head.names}

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
            found = model.forward({**constants, **tensors}, inputs, training).features
            projected = torch.nn.functional.linear(found, tensors["projection.weight"], tensors["projection.bias"])
            embedding = unit(projected)
            return fb.Outputs(etf_logits(embedding, constants[CLASSIFIER], tensors[SCALE]), embedding)

        weights = {**body, **projection, SCALE: torch.tensor(self.params.scale)}
        return replace(model, weights=weights, forward=forward, head=None, constants={CLASSIFIER: classifier})

    @fb.hookimpl
    def local_loss(self, step: fb.LocalStep) -> Tensor:
        """Cross-entropy of the balanced logits."""
        return mean_cross_entropy(step.outputs.logits + balance(step.task.visible_counts), step.labels)

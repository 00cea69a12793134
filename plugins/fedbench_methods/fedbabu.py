"""FedBABU - Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.

The head keeps its initial values in federated training; only the body is updated and averaged:
    body_k ← body_k − η ∇_body F_k(body_k, head⁰),      body ← Σ_k (n_k / Σ_j n_j) body_k
So the global model has clients pull in no direction of their own by their heads. A client's own model is the global one
trained on, after the last round, on the client's data: set finetune_epochs (5 in the paper) for the columns of these.

Wraps: build_model (refuses a model that has a head alone), local_objective (the head is a constant). Stacks with any
method; a model that another method lets a client keep is trained whole. The head is the model's linear one, or its last
layers by the names of the weights. On CLIP with a head from texts this is a fixed text classifier.
Left open / contradicted: what is fine-tuned is the whole model by default, `finetune=head` or `body` a part of it; the
paper has all three. FL-bench sets the head's gradient to zero, whereupon weight decay still moves it: here it does not
move by a bit. The head is sent with the rest, as FedAvg's is, though it never changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.layers import two_parts
from fedbench.toolkit.wrapping import Build, Objective, frozen


@dataclass(frozen=True, kw_only=True)
class FedBabuParams:
    """Hyper-parameters of FedBABU."""

    layers: int = fb.hyper(1, symbol="head", low=1, high=100, search=False, source="the paper's head is the last layer")
    finetune: Literal["all", "head", "body"] = fb.hyper(
        "all", symbol="fine-tuning", source="the paper's three; ours: all"
    )


class FedBABU(fb.Method[FedBabuParams]):
    """Only the body is trained, under a head that stays as it was drawn."""

    name = "fedbabu"
    citation = "Oh, Kim, Yun, FedBABU: Toward Enhanced Representation for FL, ICLR 2022"
    role = "local objective"
    requires = ("sent_head", "sent_steps")

    @fb.wrapper
    def build_model(self, setup: fb.ModelSetup, rest: Build) -> fb.Model:
        """What the stack trains, if there is more of it than the head."""
        model = rest(setup)
        two_parts(model, self.params.layers, self.name)
        return model

    @fb.wrapper
    def local_objective(self, step: fb.LocalStep, rest: Objective) -> Tensor:
        """The stack's loss of the body; after the last round, of what is fine-tuned."""
        if step.is_own:
            return rest(step)
        body, head = two_parts(step.model, self.params.layers, self.name)
        is_tuned = step.task.round > step.task.training.rounds
        trained = self.params.finetune if is_tuned else "body"
        return rest(step) if trained == "all" else rest(frozen(step, head if trained == "body" else body))

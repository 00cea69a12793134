"""Logit adjustment - Menon, Jayasumana, Rawat, Jain, Veit, Kumar, "Long-Tail Learning via Logit Adjustment", ICLR 2021.

Clients minimise the stack's loss at logits that carry the prior π of all clients' labels, π_k = N_k / N:
    L = −log [exp(o_y + τ log π_y) / Σ_k exp(o_k + τ log π_k)]                                            (Eq. 10)
A rare class needs a larger margin in training. Predictions use o. `fedlc` does so with a client's own counts.

Answers: start (clients report their counts once). Wraps: broadcast (π goes down), local_objective. Stacks with any
learner whose loss reads logits; a loss that does not (that of `fedclip`), and a model that another method lets a client
keep, are left alone. τ = 0 is FedAvg, bit for bit. Cost: 8 C bytes a client up once, 4 C down a round.
Left open: a class that nobody has. Its π is taken as 1e-8. The released code of CAPT has this term with τ = 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.losses import adjusted, class_prior
from fedbench.toolkit.wrapping import Objective, Send, with_outputs

PRIOR = "logit-adjustment.prior"


@dataclass(frozen=True, kw_only=True)
class LogitAdjustmentParams:
    """Hyper-parameters of logit adjustment."""

    tau: float = fb.hyper(1.0, symbol="τ", low=0.0, high=4.0, neutral=0.0, search=(0.25, 2.0), source="section 4.2: 1")


class LogitAdjustment(fb.Method[LogitAdjustmentParams]):
    """Logits adjusted by the prior of all clients' classes."""

    name = "logit-adjustment"
    citation = "Menon et al., Long-Tail Learning via Logit Adjustment, ICLR 2021"
    requires = ("labels", "sent_steps")

    @fb.hookimpl
    def start(self, task: fb.StartTask) -> fb.Tensors:
        """Label counts go up once."""
        counts = task.class_counts
        task.state[self.name] = {PRIOR: class_prior(counts)}
        return {"class_counts": counts}

    @fb.wrapper
    def broadcast(self, task: fb.BroadcastTask, rest: Send) -> fb.Broadcast:
        """What the stack sends, and π."""
        sent = rest(task)
        return replace(sent, payload={**sent.payload, **task.state[self.name]})

    @fb.wrapper
    def local_objective(self, step: fb.LocalStep, rest: Objective) -> Tensor:
        """The stack's loss of the adjusted logits."""
        if step.is_own or self.params.tau == 0:
            return rest(step)
        prior, tau = step.task.payload[PRIOR], self.params.tau
        return rest(with_outputs(step, lambda outputs: replace(outputs, logits=adjusted(outputs.logits, prior, tau))))

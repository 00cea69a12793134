"""Local - every client alone, the floor of every table of personalised methods (the "local" rows of McMahan et al.,
AISTATS 2017, and of each personalised paper since).

Client k goes on from its own weights whenever it is drawn, on its own samples, and sends nothing:
    w_k ← w_k − η ∇ F_k(w_k),   w_k at first the model's initial weights

Answers: private (all weights and running statistics). Wraps: local_objective (the weights are the client's own, so
nothing pulls them to what others have: `fedprox`, `scaffold` and the like add no term), evaluate. Stacks with any
learner and local objective: `promptfl+local` is CoOp on every client. There is no global model: what works on one, most
server steps and aggregations, is refused. Clients are drawn as under every method: with a participation of 0.1 a client
trains in a tenth of the rounds, so give it rounds enough, or compare at full participation. A client that was never
drawn predicts by the initial weights. What it trained stays where its update would have been lost.
Left open: papers run it for as many epochs as federated clients train in all, or to convergence; here the run says.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.wrapping import Evaluate, Objective, own_predictions


class Local(fb.Method[fb.NoParams]):
    """Every client trains alone."""

    name = "local"
    citation = "the baseline without communication, as in McMahan et al., AISTATS 2017"
    keeps_lost_training = True
    prevents = ("sent_steps",)

    @fb.hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """All weights and running statistics."""
        return (*model.weights, *model.buffers)

    @fb.wrapper
    def local_objective(self, step: fb.LocalStep, rest: Objective) -> Tensor:
        """The stack's loss, told that the weights are the client's own."""
        return rest(replace(step, is_own=True))

    @fb.wrapper
    def evaluate(self, task: fb.EvaluationTask, rest: Evaluate) -> fb.Predictions:
        """Each client's by its own weights; nothing globally, as there is no such model."""
        answer = own_predictions(task, rest, task.own_model)
        return answer if task.client is not None else fb.Predictions(None, answer.by_client)

"""Centralized - what a stack learns from all clients' data pooled, the upper bound of its federated rows.

Minimises the stack's loss over the pooled training data D = ∪_k D_k, as one client that takes part in every round:
    w ← w − η ∇ F(w; batch of D),   rounds × local_epochs epochs in all (or rounds × local_steps steps)

Answers: federate. Stacks with any learner: `centralized+promptfl` is the bound of PromptFL, `centralized` alone that
of FedAvg on the run's model. It equals FedAvg with one client bit for bit. Not a federated method: the leaderboard's
MB column counts that one client. Refused with methods that keep tensors private, which need clients.
Left open: papers bound by a run of equal epochs, as here, or by one to convergence: raise `rounds`. The pooled client
takes Σ n_j / n_k times a federated one's steps a round. `clip-linear-centralized` is the same for one paper's head.
"""

from __future__ import annotations

from fedbench.api import Federation, Method, NoParams, RunSpec, hookimpl
from fedbench_methods.shared.clients import pooled


class Centralized(Method[NoParams]):
    """All clients' data on one, an upper bound."""

    name = "centralized"
    citation = "the baseline without privacy: pooled training, as in McMahan et al., AISTATS 2017"

    @hookimpl
    def federate(self, federation: Federation, spec: RunSpec) -> Federation:
        """One client holding the pooled data."""
        return pooled(federation)

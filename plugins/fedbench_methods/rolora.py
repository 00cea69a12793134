"""RoLoRA - Chen, Guo, Ju, Dalal, Zhu, Khisti, "Robust Federated Finetuning of LLMs via Alternating Optimization of
LoRA", NeurIPS 2025; arXiv 2502.01755.

Rounds take turns: in one all clients train B of every low-rank addition γ B A with A held as received, in the next A
with B held. Either way the mean of the additions is the addition of the mean, exactly:
    odd t:  B ← Σ_i p_i B_i   (A the same for all);     even t:  A ← Σ_i p_i A_i   (B the same for all)

Wraps: build_model (only to refuse a model without such factors), local_objective (the factor held is a constant, which
an optimiser leaves alone, its weight decay included). Stacks on a learner with such factors (clip-lora+rolora), of
which it knows the names `*.A` and `*.B`, and with methods that change losses or the server's step; other weights of
the learner are trained in every round. Loss terms see the factor held as it is: no term moves it.
Left open: no code is published. Which factor comes first is not what the method is about, but with B = 0, as usual, A
has no gradient in round 1: so B is first, and `first=A` loses a round.
Cost: the half that moves would do, r w floats a projection up; the harness counts both halves, the same as without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.low_rank import pairs_of
from fedbench.toolkit.wrapping import Build, Objective, frozen


@dataclass(frozen=True, kw_only=True)
class RoLoRAParams:
    """Hyper-parameters of RoLoRA."""

    first: Literal["B", "A"] = fb.hyper("B", symbol="first", source="not given; B, since B = 0 gives A no gradient")


def held_factor(round: int, first: str) -> str:
    """Which factor, "A" or "B", clients hold in ``round`` (1 is the first)."""
    other = "A" if first == "B" else "B"
    return other if round % 2 else first


class RoLoRA(fb.Method[RoLoRAParams]):
    """Trains B and A of every low-rank addition in turns."""

    name = "rolora"
    citation = "Chen et al., Robust Federated Finetuning of LLMs via Alternating Optimization, NeurIPS 2025"
    role = "aggregation"
    needs_learner = "clip-lora"

    @fb.wrapper
    def build_model(self, setup: fb.ModelSetup, rest: Build) -> fb.Model:
        """The learner's model as it is. Raises Unworkable for one without low-rank factors."""
        model = rest(setup)
        pairs_of(model.weights, self.name)
        return model

    @fb.wrapper
    def local_objective(self, step: fb.LocalStep, rest: Objective) -> Tensor:
        """The stack's loss, with the factor that is not the round's as a constant."""
        held = held_factor(step.task.round, self.params.first)
        names = [f"{name}.{held}" for name in pairs_of(step.weights, self.name)]
        return rest(frozen(step, names))

"""A multi-armed bandit, and the pace of a federation that it sets.

A bandit plays one of a few arms at a time, the one that has paid best so far, with room for trying the others. What it
knows are two tensors: ``values`` Q (A,) float64, the mean of what each arm has earned, and ``plays`` N (A,) int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.api import Tensors, Update


def updated(values: Tensor, plays: Tensor, arm: int, reward: float) -> tuple[Tensor, Tensor]:
    """Q and N after ``arm`` a earned ``reward`` r: N(a) + 1, then Q(a) + (r - Q(a)) / N(a); both new, (A,)."""
    played, moved = plays.clone(), values.clone()
    played[arm] += 1
    moved[arm] += (reward - values[arm]) / played[arm]
    return moved, played


def choose(values: Tensor, plays: Tensor, epsilon: float, bonus: float, generator: torch.Generator) -> int:
    """A uniformly drawn arm with probability ``epsilon``, else argmax_a Q(a) + c sqrt(ln(t + 1) / (N(a) + 1)).

    c is ``bonus`` and t the number of all plays. Of equal arms the first is taken.
    """
    if float(torch.rand((), generator=generator)) < epsilon:
        return int(torch.randint(len(values), (), generator=generator))
    total = plays.sum().double()
    return int((values + bonus * torch.sqrt(torch.log1p(total) / (plays + 1))).argmax())


def reward(before: float, loss: float, bytes_share: float, cost: float) -> float:
    """(before - loss) / before - cost * bytes_share: the relative fall of a loss, less what was sent for it.

    ``before`` = 0 stands for no earlier loss: then there is no fall. ``bytes_share`` is of the costliest arm's bytes.
    """
    fall = (before - loss) / before if before > 0 else 0.0
    return fall - cost * bytes_share


WINDOW = 5
"""Evaluations over which the released code of CAPT takes the speed of convergence."""


def index(values: Tensor, plays: Tensor) -> Tensor:
    """Q/n + sqrt(2 ln(N + 1) / n), (A,) float64, with n + 1e-5 for n = ``plays`` and N their sum (CAPT's code)."""
    counted = plays.double() + 1e-5
    return values / counted + torch.sqrt(2 * torch.log1p(plays.sum().double()) / counted)


def draw(values: Tensor, plays: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """``count`` arms, each uniform with probability 0.1, else of the largest `index`, the first of equal ones."""
    explored = torch.rand(count, generator=generator) < 0.1
    anyone = torch.randint(len(values), (count,), generator=generator)
    return torch.where(explored, anyone, index(values, plays).argmax()).tolist()


def points(accuracies: Sequence[float], f1: float) -> float:
    """0.6 a + 0.3 F1 + 0.1 (a - a') / 5 of the ``accuracies`` so far: a is the last, a' the fourth before it.

    Without that one the last term is 0.
    """
    speed = (accuracies[-1] - accuracies[-WINDOW]) / WINDOW if len(accuracies) >= WINDOW else 0.0
    return 0.6 * accuracies[-1] + 0.3 * f1 + 0.1 * speed


def earned(values: Tensor, plays: Tensor, arms: Sequence[int], reward: float, round: int) -> Tensors:
    """``values`` Q and ``plays`` n after each of ``arms`` got ``reward`` r in ``round`` t (1 is the first):
    n + 1, then Q + 0.1 * 0.95^(t - 1) (r - Q)."""
    values, plays = values.clone(), plays.clone()
    for arm in arms:
        plays[arm] += 1
        values[arm] += 0.1 * 0.95 ** (round - 1) * (reward - values[arm])
    return {"values": values, "plays": plays}


def mean_loss(updates: Sequence[Update]) -> float:
    """The clients' mean training loss, weighted by their samples."""
    total = sum(update.num_examples for update in updates)
    return sum(update.num_examples * update.metrics["train_loss"] for update in updates) / total


@dataclass(frozen=True)
class Pace:
    """A bandit over (exchanges within a round, rounds from one global mean to the next).

    Its state is of tensors: ``values``, ``plays``, the ``arm`` in play, the last round's ``loss``, and ``apart``, the
    rounds since the last global mean.
    """

    arms: tuple[tuple[int, int], ...]
    epsilon: float
    bonus: float
    cost: float

    def begin(self, generator: torch.Generator) -> Tensors:
        """The state before round 1: nothing earned, the first arm chosen."""
        values, plays = torch.zeros(len(self.arms), dtype=torch.float64), torch.zeros(len(self.arms), dtype=torch.int64)
        return self._state(values, plays, 0.0, 0, generator)

    def exchanges(self, state: Tensors) -> int:
        """The exchanges of the round to come."""
        return self.arms[int(state["arm"])][0]

    def end_round(self, state: Tensors, loss: float, generator: torch.Generator) -> tuple[Tensors, bool]:
        """The state after a round that ended at ``loss``, the next arm chosen; and whether a global mean is due.

        The arm in play earns the fall of the loss since the round before, less its exchanges, all of one size.
        """
        arm = int(state["arm"])
        exchanges, period = self.arms[arm]
        earned = reward(float(state["loss"]), loss, exchanges / max(most for most, _ in self.arms), self.cost)
        values, plays = updated(state["values"], state["plays"], arm, earned)
        apart = int(state["apart"]) + 1
        due = apart >= period
        return self._state(values, plays, loss, 0 if due else apart, generator), due

    def _state(self, values: Tensor, plays: Tensor, loss: float, apart: int, generator: torch.Generator) -> Tensors:
        arm = choose(values, plays, self.epsilon, self.bonus, generator)
        loss_tensor = torch.tensor(loss, dtype=torch.float64)
        chosen = {"arm": torch.tensor(arm), "loss": loss_tensor, "apart": torch.tensor(apart)}
        return {"values": values, "plays": plays, **chosen}

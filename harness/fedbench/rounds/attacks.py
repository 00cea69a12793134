"""What attackers among the clients send in place of what they trained.

With x the weights a client received, y what it trained and s the scenario's ``attack_scale``, it sends
    sign_flip  x − s (y − x)
    gaussian   x + s ‖y − x‖ n / ‖n‖, n of entries N(0, 1)
    alie       μ − s σ of every coordinate over what the round's attackers trained ("A Little Is Enough", Baruch et al.,
               NeurIPS 2019, whose experiments take s = 1.5; its Algorithm 3 gives s = 0 for two of ten)
Running statistics and what a method sends besides are as trained. label_flip changes labels, before training
(`fedbench.scenarios.labels`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedbench.core.method.tasks import ClientTask
from fedbench.core.randomness import torch_generator
from fedbench.core.scenario import LABEL_FLIP, Scenario
from fedbench.core.types import Tensors, Update


def attacked(
    tasks: Sequence[ClientTask], updates: tuple[Update, ...], hostile: frozenset[int], scenario: Scenario
) -> tuple[Update, ...]:
    """The ``updates`` of ``tasks`` as they are sent, where the ``hostile`` clients attack."""
    ours = [update for update in updates if update.client in hostile and update.weights]
    if scenario.attack == LABEL_FLIP or not ours:
        return updates
    by_client = {task.client: task for task in tasks}
    if scenario.attack == "alie":
        sent = dict.fromkeys((u.client for u in ours), little_is_enough(ours, scenario.attack_scale))
    else:
        sent = {u.client: _alone(by_client[u.client], u, scenario) for u in ours}
    return tuple(replace(u, weights=sent[u.client]) if u.client in sent else u for u in updates)


def _alone(task: ClientTask, update: Update, scenario: Scenario) -> Tensors:
    start, scale = {name: task.received[name] for name in update.weights}, scenario.attack_scale
    if scenario.attack == "sign_flip":
        return {name: start[name] - scale * (y - start[name]) for name, y in update.weights.items()}
    generator = torch_generator(task.spec.seed, "attack", task.round, task.client, task.exchange)
    noise = {name: torch.randn(y.shape, generator=generator).to(y) for name, y in update.weights.items()}
    change = {name: y - start[name] for name, y in update.weights.items()}
    factor = scale * _length(change) / _length(noise)
    return {name: start[name] + factor * noise[name] for name in update.weights}


def _length(tensors: Tensors) -> Tensor:
    return torch.stack([value.double().square().sum() for value in tensors.values()]).sum().sqrt().float()


def little_is_enough(ours: Sequence[Update], scale: float) -> Tensors:
    """What all attackers send, from what they trained; of one alone what it trained."""
    rows = {name: torch.stack([update.weights[name] for update in ours]) for name in ours[0].weights}
    return {name: values.mean(0) - scale * values.std(0, correction=0) for name, values in rows.items()}

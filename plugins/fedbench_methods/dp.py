"""DP-FedAvg - McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018,
for clients: who sees the models that a run ends with, or sends, can hardly tell whether one client was another.

Of the m updates of a round, with x the received weights, the server takes
    Δ_k = (y_k − x) · min(1, S / ‖y_k − x‖),      x ← x + (1/m) Σ_k Δ_k + (z S / m) n,   n of entries N(0, 1)
of all weights together. All clients count alike.

(ε, δ) is for replacing a client by another one with samples, which moves the mean by 2 S / m at most. It counts what
the run really does: rounds that each take ⌊share N⌋ of N clients without replacement (Wang, Balle, Kasiviswanathan,
AISTATS 2019), by dp-accounting. `epsilon` sets z for all rounds; 0 leaves it to `noise`. Scored rounds record
`dp_epsilon`.

Wraps: aggregate, to whose rest every client has sent the new x: what a server step, or another mean, makes of it says
no more about anyone. So it stacks with all learners that send nothing but weights; one that sends more (class counts,
prototypes, batch-norm's running statistics), or has clients train in turn, is refused, since ε would leave that out.
Own models stay with their clients. Nothing more is sent. Without S and z it is FedAvg bit for bit.
Left open: the server is trusted and adds the noise. ε is for who knows neither cohorts nor the seed: a record of the
run has both, as it is a simulation, and losses, accuracies of clients and measures (`drift`) that ε does not cover. S,
the rate and all else that was chosen on the same data are not covered either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedbench.api import AggregationTask, FedbenchError, Method, Scenario, Tensors, hyper, wrapper
from fedbench.toolkit.fedavg import weighted_mean
from fedbench.toolkit.wrapping import Aggregate, Aggregated
from fedbench_methods.shared.robust import shortened

LEAST_NOISE = 0.05


@dataclass(frozen=True, kw_only=True)
class DPParams:
    """Hyper-parameters of DP-FedAvg."""

    clip: float = hyper(
        1.0, symbol="S", low=1e-4, high=1e4, log=True, off=0.0, search=(0.01, 10.0), source="paper: by usual lengths"
    )
    epsilon: float = hyper(
        8.0, symbol="ε", low=0.01, high=1e4, off=0.0, search=False, source="of all rounds; 0: as noise says"
    )
    delta: float = hyper(1e-5, symbol="δ", low=1e-12, high=0.1, search=False, source="below 1 / N, as usual")
    noise: float = hyper(1.0, symbol="z", low=0.01, high=1e4, off=0.0, search=False, source="paper: 1; where ε is 0")


@lru_cache(maxsize=64)
def spent(clients: int, cohort: int, exchanges: int, rounds: int, noise: float, delta: float) -> float:
    """ε after ``rounds`` of ``exchanges`` with the same ``cohort`` of so many ``clients``, at z ``noise``."""
    event = _event(clients, cohort, exchanges, rounds, noise)
    return float(_accountant().compose(event).get_epsilon(delta))


@lru_cache(maxsize=64)
def noise_for(clients: int, cohort: int, exchanges: int, rounds: int, epsilon: float, delta: float) -> float:
    """z by which ε after all ``rounds`` is ``epsilon``, or a little less."""
    accounting = _library()
    try:
        noise = accounting.calibrate_dp_mechanism(
            _accountant,
            lambda noise: _event(clients, cohort, exchanges, rounds, noise),
            epsilon,
            delta,
            accounting.LowerEndpointAndGuess(LEAST_NOISE, 4.0),
            tol=1e-3,
        )
    except accounting.mechanism_calibration.NoBracketIntervalFoundError as error:
        raise FedbenchError(
            f"dp finds no noise for dp.epsilon={epsilon:g} and dp.delta={delta:g} over {rounds} rounds; choose another "
            "dp.epsilon, or set it to 0 and dp.noise."
        ) from error
    return float(noise)


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        raise FedbenchError(
            'dp counts ε with dp-accounting, which is not installed; pip install "fedbench-harness[privacy]".'
        ) from error
    return dp_accounting


def _accountant() -> Any:
    accounting = _library()
    return accounting.rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)


def _event(clients: int, cohort: int, exchanges: int, rounds: int, noise: float) -> Any:
    """All rounds. The noise is z / 2 times what replacing a client can change."""
    accounting = _library()
    each = accounting.SelfComposedDpEvent(accounting.GaussianDpEvent(noise / 2), exchanges)
    if cohort < clients:
        each = accounting.SampledWithoutReplacementDpEvent(clients, cohort, each)
    return accounting.SelfComposedDpEvent(each, rounds)


class DP(Method[DPParams]):
    """Shortens changes and adds noise to their mean, for differential privacy of clients."""

    name = "dp"
    citation = "McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018"
    role = "defence"
    requires = ("global_model", "sent_weights", "only_weights")
    prevents: tuple[str, ...] = ("weighed_clients", "own_updates")

    def __init__(self, params: DPParams) -> None:
        super().__init__(params)
        self.prevents = self.prevents if params.clip else ()
        if params.clip and (params.epsilon or params.noise):
            _library()  # refused before anything runs

    @wrapper
    def aggregate(self, task: AggregationTask, rest: Aggregate) -> Aggregated:
        """The stack's answer to the noisy mean."""
        if not self.params.clip or not task.weights:
            return rest(task)
        refuse_more(task)
        params, training, mean = self.params, task.spec.training, clipped_mean(task, self.params.clip)
        noise = params.noise
        if params.epsilon:
            noise = noise_for(*planned(task), training.rounds, params.epsilon, params.delta)
        if noise:
            draws, size = task.generator("noise of dp"), noise * params.clip / len(task.updates)
            mean = {n: mean[n] + size * torch.randn(mean[n].shape, generator=draws).to(mean[n]) for n in sorted(mean)}
            if task.round % training.eval_every == 0 or task.round == training.rounds:  # it takes a tenth of a second
                task.metrics["dp_epsilon"] = spent(*planned(task), task.round, noise, params.delta)
        same = (replace(u, weights=mean, num_examples=1, metrics={}) for u in task.updates)
        return rest(replace(task, updates=tuple(same)))


def planned(task: AggregationTask) -> tuple[int, int, int]:
    """N clients, the cohort that is drawn of them, and the exchanges of a round."""
    scenario: Scenario = task.spec.scenario
    return task.num_clients, max(int(scenario.participation * task.num_clients + 1e-9), 1), task.exchanges


def clipped_mean(task: AggregationTask, clip: float) -> Tensors:
    """x + (1/m) Σ Δ_k, by name."""
    updates = [shortened(update, task.weights, clip) for update in task.updates]
    shares = torch.full((len(updates),), 1 / len(updates), dtype=torch.float64)
    return {name: weighted_mean([u.weights[name] for u in updates], shares) for name in task.weights}


def refuse_more(task: AggregationTask) -> None:
    """FedbenchError where updates have more than weights."""

    def changed(name: str, value: Tensor) -> bool:
        return name not in task.buffers or (
            value is not task.buffers[name] and not torch.equal(value, task.buffers[name])
        )

    if task.spec.scenario.attackers and task.spec.scenario.attack == "alie":
        raise FedbenchError("dp counts clients one by one, and attack=alie lets attackers share what they trained.")
    asked = task.state.setdefault(DP.name, {"exchanges": torch.tensor(task.exchanges)})["exchanges"]
    if int(asked) != task.exchanges:
        raise FedbenchError(
            f"dp needs as many exchanges in all rounds; {task.spec.method} has {asked}, then {task.exchanges}."
        )
    more = {name for u in task.updates for name in u.payload}
    more |= {name for u in task.updates for name, value in u.buffers.items() if changed(name, value)}
    if more:
        raise FedbenchError(
            f"dp adds noise to weights alone, and in {task.spec.method} clients also send {min(more)!r}: its ε would "
            "leave that out. Choose a method or a backbone whose clients send weights only, or keep batch-norm with "
            "the clients (fedbn)."
        )

"""DP-FedAvg: McMahan et al. 2018; the accountant of Wang, Balle, Kasiviswanathan 2019."""

import math
import sys
from functools import cache
from statistics import NormalDist

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.types import Update
from fedbench.rounds.loop import rounds
from fedbench.toolkit.fedavg import average
from fedbench_methods.dp import DP, DPParams, clipped_mean, noise_for, spent
from tests.equations.kit import RESNET, aggregation, drawn, end_of, run_of, updates_of

mpmath = pytest.importorskip("mpmath")
pytest.importorskip("dp_accounting")


def by_the_formula(clients, cohort, rounds, noise, delta):
    """ε by Rényi orders from 2 to 64, with 60 digits: Theorem 27 of Wang et al. for a Gaussian whose deviation is
    noise / 2 of what replacing one can change, and the conversion of Canonne, Kamath, Steinke (2020)."""
    mp = mpmath.mp
    mp.dps = 60
    z, q = mp.mpf(noise) / 2, mp.mpf(cohort) / clients

    def gaussian(order):
        return mp.mpf(order) / (2 * z**2)

    @cache
    def difference(at):
        terms = ((-1) ** (at - i) * mp.binomial(at, i) * mp.exp((i - 1) * gaussian(i)) for i in range(at + 1))
        return sum(terms, mp.mpf(0))

    def divergence(order):
        if cohort == clients:
            return gaussian(order)
        two = gaussian(2)
        total = 1 + q**2 * mp.binomial(order, 2) * min(4 * (mp.exp(two) - 1), 2 * mp.exp(two))
        for j in range(3, order + 1):
            both = mp.sqrt(difference(2 * (j // 2)) * difference(2 * -(-j // 2)))
            total += 4 * q**j * mp.binomial(order, j) * both
        return mp.log(total) / (order - 1)

    def converted(order):
        of_delta = (mp.log(mp.mpf(delta)) + mp.log(order)) / (order - 1)
        return rounds * divergence(order) + mp.log(mp.mpf(order - 1) / order) - of_delta

    return float(min(converted(order) for order in range(2, 65)))


@pytest.mark.parametrize(
    "setting", [(20, 20, 10, 40.0, 1e-5), (100, 10, 50, 20.0, 1e-5), (1000, 50, 100, 8.0, 1e-6)], ids=str
)
def test_epsilon_is_that_of_an_independent_computation(setting):
    clients, cohort, count, noise, delta = setting
    epsilon = spent(clients, cohort, 1, count, noise, delta)
    assert epsilon == pytest.approx(by_the_formula(*setting), rel=1e-9)
    # and the noise for that epsilon is that noise
    assert noise_for(clients, cohort, 1, count, epsilon, delta) == pytest.approx(noise, rel=1e-3)


def test_more_rounds_exchanges_and_clients_of_a_round_spend_more_and_noise_less():
    base = spent(100, 10, 1, 10, 20.0, 1e-5)
    assert spent(100, 10, 1, 20, 20.0, 1e-5) > base and spent(100, 10, 2, 10, 20.0, 1e-5) > base
    assert spent(100, 20, 1, 10, 20.0, 1e-5) > base > spent(100, 10, 1, 10, 40.0, 1e-5)


def test_the_clipped_mean_by_hand_counts_clients_alike():
    # changes (3, 4) and (.3, -.4) from (1, 1), 5 and .5 long; cut to 1: (.6, .8)
    updates = updates_of([torch.tensor([4.0, 5.0]), torch.tensor([1.3, 0.6])], [1, 1000])
    mean = clipped_mean(aggregation({"w": torch.tensor([1.0, 1.0])}, updates), 1.0)
    torch.testing.assert_close(mean["w"], torch.tensor([1.45, 1.2]))


def noisy(ends, round=1, **params):
    """The new weights of one round of dp, from zeros, and the metrics."""
    task = aggregation({"w": torch.zeros(len(ends[0]))}, updates_of(ends, [1] * len(ends)), round=round, num_clients=8)
    return DP(DPParams(**params)).aggregate(task, average)["w"], task.metrics


def test_noise_is_as_large_as_said_and_new_every_round():
    ends = [torch.zeros(20_000) for _ in range(4)]
    found, metrics = noisy(ends, epsilon=0.0, noise=2.0, clip=3.0)
    assert found.std().item() == pytest.approx(2 * 3 / 4, rel=0.03) and abs(found.mean().item()) < 0.03
    assert metrics["dp_epsilon"] == pytest.approx(spent(8, 8, 1, 1, 2.0, 1e-5))
    assert not torch.equal(found, noisy(ends, round=2, epsilon=0.0, noise=2.0, clip=3.0)[0])
    assert "dp_epsilon" not in noisy(ends, epsilon=0.0, noise=0.0)[1]


def test_epsilon_of_the_last_round_is_the_one_asked_for():
    run = run_of("dp", {"dp": {"epsilon": 3.0}}, rounds=3)
    seen = [record.method_metrics["dp_epsilon"] for _, record, _ in rounds(run, run.initial_state()) if record.round]
    assert seen == sorted(seen) and seen[-1] == pytest.approx(3.0, rel=1e-3) and seen[-1] <= 3.0 + 1e-6


def test_replacing_a_client_moves_the_mean_by_no_more_than_the_noise_was_counted_for():
    # the worst case: a change of S one way instead of the other; the noise has the same seed
    way = torch.nn.functional.normalize(drawn(40, seed=1), dim=0)
    others = [drawn(40, seed=k) for k in range(2, 9)]
    both = [noisy([sign * 100 * way, *others], epsilon=0.0, noise=2.0, clip=3.0)[0] for sign in (1, -1)]
    assert (both[0] - both[1]).norm().item() == pytest.approx(2 * 3 / 8, rel=1e-4)
    # of which the deviation 2 * 3 / 8 of the noise is z / 2 times, as `spent` counts it


def test_who_took_part_can_be_told_without_noise_and_hardly_at_epsilon_one():
    way = torch.nn.functional.normalize(drawn(30, seed=1), dim=0)
    others = [torch.zeros(30)] * 7

    def accuracy(**params):
        """How often the best test, by the mean's direction, tells a change one way from one the other way."""
        along = [noisy([sign * way, *others], round=k + 1, **params)[0] @ way for k in range(300) for sign in (1, -1)]
        return sum(bool(value > 0) == (k % 2 == 0) for k, value in enumerate(along)) / len(along)

    noise = noise_for(8, 8, 1, 1, 1.0, 1e-5)
    # the changes are 2 / z deviations apart: the best test is right with probability Φ(1 / z)
    assert accuracy(epsilon=0.0, noise=0.0) == 1.0
    private, right = accuracy(epsilon=0.0, noise=noise), NormalDist().cdf(1 / noise)
    assert private == pytest.approx(right, abs=0.06) and right < 0.6
    assert accuracy(epsilon=0.0, noise=1.0) == pytest.approx(NormalDist().cdf(1.0), abs=0.05)


@pytest.mark.parametrize(
    ("stack", "backbone", "message"),
    [
        ("ccvr+dp", "", "dp needs clients that send nothing but the weights .* ccvr prevents"),
        ("capt+dp", "", "dp needs one model that clients send, round after round, which capt prevents"),
        ("dp+in-turn", "", "in-turn prevents"),
        ("creff+dp", "", "creff prevents"),
        ("dp+fedspeed", "", "fedspeed needs each client's own update"),
        ("dp+fedamp", "", "fedamp needs each client's own update"),
        ("dp+scaffold", "", "clients also send|scaffold prevents"),
        ("dp", RESNET, "clients also send '.*bn1"),
        ("dp+median", "", "dp and median are both a defence"),
    ],
)
def test_what_epsilon_would_leave_out_is_refused(stack, backbone, message):
    with pytest.raises(FedbenchError, match=message):
        end_of(stack, backbone=backbone, rounds=1)


def test_batch_norm_that_stays_with_the_clients_is_none_of_it():
    end_of("dp+fedbn", backbone=RESNET, rounds=1)


def test_a_server_step_sees_the_noisy_mean_alone():
    seen = {}

    def rest(task):
        seen["updates"] = task.updates
        return average(task)

    updates = (Update(0, {"w": torch.ones(2)}, {}, 5), Update(1, {"w": -torch.ones(2)}, {}, 7))
    found = DP(DPParams()).aggregate(aggregation({"w": torch.zeros(2)}, updates, num_clients=2), rest)
    assert all(torch.equal(u.weights["w"], found["w"]) and u.num_examples == 1 for u in seen["updates"])
    assert math.isfinite(found["w"].sum())


def test_attackers_who_share_what_they_trained_and_impossible_budgets_are_refused():
    scenario = {"participation": 1.0, "attackers": 0.5, "attack": "alie"}
    with pytest.raises(FedbenchError, match="lets attackers share what they trained"):
        end_of("dp", scenario=scenario, rounds=1)
    with pytest.raises(FedbenchError, match="dp finds no noise for dp.epsilon=0.01"):
        noise_for(20, 20, 1, 1, 0.01, 1e-12)


def test_without_its_extra_it_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(FedbenchError, match=r"not installed; pip install .*\[privacy\]"):
        run_of("dp")
    run_of("dp", {"dp": {"noise": 0.0, "epsilon": 0.0}})  # which has nothing to count

"""The schedule of cohorts: sizes, reproducibility and drop-out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedbench.core.scenario import Scenario
from fedbench.scenarios.participation import Schedule, cohort, schedule


@pytest.mark.parametrize(
    ("clients", "participation", "size"),
    [(20, 0.4, 8), (30, 0.1, 3), (100, 0.29, 29), (100, 0.07, 7), (7, 0.5, 3), (5, 0.1, 1), (3, 1.0, 3), (10, 0.19, 1)],
)
def test_cohort_size_is_the_floor_and_at_least_one(clients: int, participation: float, size: int) -> None:
    for number in range(5):
        chosen = cohort(number, clients, participation, 0.0, seed=0)
        assert len(chosen) == len(set(chosen)) == size
        assert chosen == sorted(chosen) and set(chosen) <= set(range(clients))


def test_schedule_depends_on_seed_and_round_alone() -> None:
    def schedule(seed: int) -> list[list[int]]:
        return [cohort(number, 20, 0.4, 0.2, seed) for number in range(10)]

    np.random.seed(1)
    first = schedule(0)
    np.random.seed(2)
    assert schedule(0) == first
    assert schedule(1) != first
    assert len({tuple(c) for c in first}) > 5
    assert cohort(7, 20, 0.4, 0.2, 0) == first[7]  # a resumed run draws the same cohort without the rounds before


def test_global_generators_are_untouched() -> None:
    before, torch_before = np.random.get_state()[1].copy(), torch.random.get_rng_state()  # type: ignore[index]
    cohort(0, 20, 0.4, 0.5, 0)
    assert np.array_equal(before, np.random.get_state()[1])  # type: ignore[index]
    assert torch.equal(torch_before, torch.random.get_rng_state())


def test_every_client_is_sampled_equally_often() -> None:
    seen = np.bincount(np.concatenate([cohort(number, 20, 0.4, 0.0, 3) for number in range(1000)]), minlength=20)
    assert np.abs(seen - 400).max() < 4 * np.sqrt(1000 * 0.4 * 0.6)


def test_dropout_thins_the_same_schedule() -> None:
    kept = 0
    for number in range(500):
        sampled, answering = cohort(number, 20, 0.5, 0.0, 0), cohort(number, 20, 0.5, 0.3, 0)
        assert set(answering) <= set(sampled) and answering == sorted(answering)
        kept += len(answering)
    assert abs(kept - 3500) < 4 * np.sqrt(5000 * 0.3 * 0.7)


def test_nobody_may_be_left() -> None:
    survivors = [cohort(number, 10, 0.5, 0.9, 0) for number in range(400)]
    # five are sampled: all of them drop out with probability 0.9^5 = 0.59
    assert abs(survivors.count([]) - 236) < 4 * np.sqrt(400 * 0.59 * 0.41)


FAULTY = Scenario(participation=0.5, dropout=0.2, late_dropout=0.3, stragglers=0.4, straggler_work=0.25, corrupt=0.25)


def schedules(scenario: Scenario, rounds: int = 500, clients: int = 20) -> list[Schedule]:
    return [schedule(number, clients, scenario, seed=0) for number in range(rounds)]


def test_without_faults_the_whole_cohort_trains_and_arrives() -> None:
    for number, drawn in enumerate(schedules(Scenario(participation=0.5), 20)):
        asked = tuple(cohort(number, 20, 0.5, 0.0, 0))
        assert drawn == Schedule(asked, asked, frozenset(), {}, frozenset())


def test_faults_befall_the_clients_they_can_befall_as_often_as_said() -> None:
    drawn = schedules(FAULTY)
    asked, training = (sum(len(who) for who in of) for of in zip(*((s.chosen, s.training) for s in drawn), strict=True))
    late, partial = sum(len(s.late) for s in drawn), sum(len(s.work) for s in drawn)
    corrupt = sum(len(s.corrupt) for s in drawn)

    def is_share(count: int, of: int, share: float) -> bool:
        return bool(abs(count - of * share) < 4 * np.sqrt(of * share * (1 - share)))

    assert asked == 5000
    assert is_share(training, asked, 0.8) and is_share(late, training, 0.3) and is_share(partial, training, 0.4)
    # what never arrives cannot arrive damaged
    assert is_share(corrupt, training - late, 0.25)
    for s in drawn:
        assert set(s.training) <= set(s.chosen) and s.late | s.corrupt | s.work.keys() <= set(s.training)
        assert not s.late & s.corrupt


def test_stragglers_do_a_uniform_share_of_their_steps() -> None:
    shares = np.array([share for s in schedules(FAULTY) for share in s.work.values()])
    assert 0.25 <= shares.min() < 0.27 and 0.98 < shares.max() < 1
    # uniform in [1/4, 1): the mean is 5/8, the standard deviation 3/4 / sqrt(12) = 0.2165
    assert abs(shares.mean() - 0.625) < 4 * 0.2165 / np.sqrt(len(shares))


@pytest.mark.parametrize("name", ["dropout", "late_dropout", "stragglers", "corrupt"])
def test_a_fault_is_drawn_alike_whichever_others_there_are(name: str) -> None:
    alone = Scenario.model_validate({"participation": 0.5, name: getattr(FAULTY, name), "straggler_work": 0.25})
    for ours, others in zip(schedules(alone, 50), schedules(FAULTY, 50), strict=True):
        assert ours.chosen == others.chosen
        remaining = set(others.training)
        assert name != "dropout" or ours.training == others.training
        assert others.late == ours.late & remaining or name != "late_dropout"
        assert others.work == {c: w for c, w in ours.work.items() if c in remaining} or name != "stragglers"
        assert others.corrupt == ours.corrupt & remaining - others.late or name != "corrupt"


def test_faults_are_independent_of_each_other() -> None:
    drawn = schedules(FAULTY)
    late = [(client in s.late, client in s.work) for s in drawn for client in s.training]
    both = np.corrcoef(np.array(late, dtype=float).T)[0, 1]
    assert abs(both) < 4 / np.sqrt(len(late))

"""The schedule of cohorts: sizes, reproducibility and drop-out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedbench.scenarios.participation import cohort


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


def test_one_client_survives_and_not_always_the_same() -> None:
    survivors = [cohort(number, 10, 0.5, 0.999, 0) for number in range(200)]
    assert all(len(s) >= 1 for s in survivors)
    assert len({s[0] for s in survivors}) == 10

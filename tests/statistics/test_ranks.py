"""Intervals of ranks, the bootstrap and power, against hand counts, scipy and statsmodels; whether they cover."""

import math

import numpy as np
import pytest
from scipy import stats

from fedbench_boards.statistics import (
    POWER,
    Test,
    across,
    detectable,
    interval,
    probability_best,
    rank_intervals,
    seeds_for,
)

NAN = math.nan


def test_an_interval_is_scipys():
    values = [1.0, 2.0, 4.0, 3.5, -1.0]
    expected = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert interval(values) == pytest.approx(expected, rel=1e-12)
    assert all(map(math.isnan, interval([1.0])))


def test_a_rank_may_be_that_of_all_rows_that_it_cannot_be_told_from():
    # differences from the first: 1 at every seed but for noise of 0.01, then 0.1 +- 1
    best = np.array([70.0, 71.0, 72.0, 73.0])
    below = best - 1 + np.array([0.01, -0.01, 0.01, -0.01])
    level = best - 0.1 + np.array([1.0, -1.0, 1.0, -1.0])
    assert rank_intervals(np.stack([below, best, level])) == [(2, 3), (1, 2), (1, 3)]
    lower = below - 5 + np.array([0.0, 0.0, 0.01, 0.01])
    assert rank_intervals(np.stack([lower, best, below])) == [(3, 3), (1, 1), (2, 2)]


def test_holm_is_over_all_rows_compared_with_one():
    best, other = np.zeros(3), np.array([-1.0, -1.2, -0.8])
    p = stats.ttest_rel(best, other).pvalue
    assert 0.05 / 5 < p < 0.05 and rank_intervals(np.stack([best, other])) == [(1, 1), (2, 2)]
    # one of five comparisons: p = 0.0131 is no longer below 0.05 / 5
    noisy = [np.array([-9.0, 9.0, -0.1]) + shift for shift in range(-5, -1)]
    assert rank_intervals(np.stack([best, other, *noisy]))[1] == (1, 6)


def test_a_row_that_varies_much_may_have_any_rank():
    best = np.array([70.0, 71.0, 72.0])
    apart, wild = best - 2 + np.array([0.01, -0.01, 0.0]), np.array([90.0, 20.0, 60.0])
    assert rank_intervals(np.stack([best, apart, wild])) == [(1, 2), (2, 3), (1, 3)]


def test_few_seeds_tell_nothing_apart_and_numbers_that_no_seed_moves_are():
    assert rank_intervals(np.array([[90.0, 91.0], [10.0, 12.0]])) == [(1, 2), (1, 2)]
    assert rank_intervals(np.array([[90.0] * 3, [89.0] * 3, [90.0] * 3])) == [(1, 2), (3, 3), (1, 2)]
    by_chance = np.array([[91.0, 92.0, 95.0], [90.0, 91.0, 94.0]])  # the same difference at every seed
    assert rank_intervals(by_chance) == [(1, 2), (1, 2)]
    five = np.array([[5.0, 6.0, 7.0, 8.0, 9.0], [1.0, 1.5, 2.5, 3.5, 4.5]])
    assert rank_intervals(five, Test.wilcoxon) == [(1, 2), (1, 2)]


def test_rows_without_a_score_have_no_rank_and_pairs_are_of_shared_seeds():
    scores = np.array([[NAN] * 4, [5.0, 6.0, 7.0, NAN], [1.0, 2.1, 3.0, 99.0]])
    # the mean of the last is the best by its seed 3, which the other lacks; over the shared ones it is 4 below
    assert rank_intervals(scores) == [None, (1, 1), (2, 2)]
    assert probability_best(scores, least=3)[1:] == [1.0, 0.0] and math.isnan(probability_best(scores, least=3)[0])
    assert all(map(math.isnan, probability_best(scores)))


def test_the_place_over_settings_is_told_by_settings_as_by_seeds():
    # a is first everywhere, but that b beats it once; c and d tie everywhere; ranks 1.17, 1.83, 3.5, 3.5
    means = {"a": [9] * 5 + [5], "b": [5] * 5 + [9], "c": [3] * 6, "d": [3] * 6}
    settings = {
        f"s{at}": {row: dict.fromkeys(range(3), float(own[at])) for row, own in means.items()} for at in range(6)
    }
    found = across(settings)
    assert found is not None and list(found.mean_ranks.index) == [*means]
    # a against b: five times -1 and once +1, t = -2, p = 0.10; against c p is next to nothing
    assert found.rank_intervals == {"a": (1, 2), "b": (1, 2), "c": (3, 4), "d": (3, 4)}


def test_the_bootstrap_agrees_with_all_draws_of_three_seeds():
    # 27 draws: the first is better where seed 2 (+1) is drawn no more than twice as often... counted by hand:
    # differences of the seeds are +3, -1, -1: a draw is for the first where 3 a > b + c with a + b + c = 3, so a >= 1
    first, second = np.array([3.0, 0.0, 0.0]), np.array([0.0, 1.0, 1.0])
    exact = 1 - (2 / 3) ** 3
    assert probability_best(np.stack([first, second]), least=3) == pytest.approx([exact, 1 - exact], abs=0.015)


def test_rows_that_are_best_together_share_it():
    same = np.array([1.0, 2.0, 3.0])
    assert probability_best(np.stack([same, same, same - 1]), least=3) == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("seeds", [3, 5, 15, 40])
def test_power_is_that_of_statsmodels(seeds):
    from statsmodels.stats.power import TTestPower

    effect = TTestPower().solve_power(nobs=seeds, alpha=0.05, power=POWER)
    assert detectable(2.0, seeds) == pytest.approx(2 * effect, rel=1e-3)


def test_the_seeds_a_gap_needs_are_the_fewest_that_find_it():
    for gap in (0.3, 1.0, 2.5):
        needed = seeds_for(gap, 1.0)
        assert needed is not None and detectable(1.0, needed) <= gap < detectable(1.0, needed - 1)
    assert seeds_for(0.0, 1.0) is None and seeds_for(1e-6, 1.0) is None


def test_intervals_and_ranks_cover_as_they_say():
    """Simulated boards: 8 rows over 6 seeds with a common effect of the seed; rows 0 to 2 are best in truth, alike."""
    draws, boards = np.random.default_rng(0), 1500
    truth = np.array([60.0, 60.0, 60.0, 59.5, 59.0, 57.0, 55.0, 40.0])
    ends = [(1, 3)] * 3 + [(rank, rank) for rank in range(4, 9)]
    covered, held, last = 0, np.zeros(8), 0
    for _ in range(boards):
        scores = truth[:, None] + draws.normal(0, 3, (1, 6)) + draws.normal(0, 1, (8, 6))
        low, high = interval(list(scores[4] - scores[0]))
        covered += low <= -1.0 <= high
        ranks = rank_intervals(scores)
        # of rows that are alike in truth, each has all their ranks
        held += [of[0] <= most and of[1] >= least for of, (least, most) in zip(ranks, ends, strict=True)]
        last += ranks[7] == (8, 8)
    assert 0.93 <= covered / boards <= 0.97
    assert (held / boards >= 0.95).all()
    assert last / boards >= 0.99  # 20 below, where one spread is 1.4

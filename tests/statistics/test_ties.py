"""Ties, the bootstrap and power, against hand counts, scipy and statsmodels; and whether they cover as they say."""

import math

import numpy as np
import pytest
from scipy import stats

from fedbench_boards.statistics import POWER, Test, detectable, interval, probability_best, seeds_for, tied_ranks

NAN = math.nan


def test_an_interval_is_scipys():
    values = [1.0, 2.0, 4.0, 3.5, -1.0]
    expected = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert interval(values) == pytest.approx(expected, rel=1e-12)
    assert all(map(math.isnan, interval([1.0])))


def test_rows_that_cannot_be_told_from_the_best_share_its_rank():
    # differences from the first: 1 at every seed but for noise of 0.01, then 0.1 +- 1
    best = np.array([70.0, 71.0, 72.0, 73.0])
    below = best - 1 + np.array([0.01, -0.01, 0.01, -0.01])
    level = best - 0.1 + np.array([1.0, -1.0, 1.0, -1.0])
    assert tied_ranks(np.stack([below, best, level])) == [3, 1, 1]
    # behind the best group the next one begins with the best that is left
    lower = below - 5 + np.array([0.0, 0.0, 0.01, 0.01])
    assert tied_ranks(np.stack([lower, best, below])) == [3, 1, 2]


def test_holm_is_over_all_rows_compared_with_the_best():
    best, other = np.zeros(3), np.array([-1.0, -1.2, -0.8])
    p = stats.ttest_rel(best, other).pvalue
    assert 0.05 / 5 < p < 0.05 and tied_ranks(np.stack([best, other])) == [1, 2]
    # one of five comparisons: p = 0.0131 is no longer below 0.05 / 5
    noisy = [np.array([-9.0, 9.0, -0.1]) + shift for shift in range(-5, -1)]
    assert tied_ranks(np.stack([best, other, *noisy]))[1] == 1


def test_a_worse_mean_has_no_better_rank_however_much_it_varies():
    best = np.array([70.0, 71.0, 72.0])
    apart, wild = best - 2 + np.array([0.01, -0.01, 0.0]), np.array([90.0, 20.0, 60.0])
    assert tied_ranks(np.stack([best, wild])) == [1, 1]
    assert tied_ranks(np.stack([best, apart, wild])) == [1, 2, 2]


def test_few_seeds_tell_nothing_apart_and_numbers_that_no_seed_moves_are():
    assert tied_ranks(np.array([[90.0, 91.0], [10.0, 12.0]])) == [1, 1]
    assert tied_ranks(np.array([[90.0] * 3, [89.0] * 3, [90.0] * 3])) == [1, 3, 1]
    assert tied_ranks(np.array([[91.0, 92.0, 95.0], [90.0, 91.0, 94.0]])) == [1, 1]  # the same difference by chance
    assert tied_ranks(np.array([[5.0, 6.0, 7.0, 8.0, 9.0], [1.0, 1.5, 2.5, 3.5, 4.5]]), Test.wilcoxon) == [1, 1]


def test_rows_without_a_score_have_no_rank_and_pairs_are_of_shared_seeds():
    scores = np.array([[NAN] * 4, [5.0, 6.0, 7.0, NAN], [1.0, 2.1, 3.0, 99.0]])
    # the mean of the last is the best by its seed 3, which the other lacks; over the shared ones it is 4 below
    assert tied_ranks(scores) == [None, 2, 1]
    assert probability_best(scores, least=3)[1:] == [1.0, 0.0] and math.isnan(probability_best(scores, least=3)[0])
    assert all(map(math.isnan, probability_best(scores)))


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


def test_intervals_and_ties_cover_as_they_say():
    """Simulated boards: 8 rows over 6 seeds with a common effect of the seed; rows 0 to 2 are best in truth, alike."""
    draws, boards = np.random.default_rng(0), 1500
    truth = np.array([60.0, 60.0, 60.0, 59.5, 59.0, 57.0, 55.0, 40.0])
    covered, best_in_first, all_in_first, worst_apart = 0, 0, 0, 0
    for _ in range(boards):
        scores = truth[:, None] + draws.normal(0, 3, (1, 6)) + draws.normal(0, 1, (8, 6))
        low, high = interval(list(scores[4] - scores[0]))
        covered += low <= -1.0 <= high
        ranks = tied_ranks(scores)
        best_in_first += ranks[0] == 1
        all_in_first += ranks[:3] == [1, 1, 1]
        worst_apart += ranks[7] != 1
    assert 0.93 <= covered / boards <= 0.97
    assert best_in_first / boards >= 0.95 and all_in_first / boards >= 0.9
    assert worst_apart / boards >= 0.99  # 20 below, where one spread is 1.4: no row shares the first rank for nothing

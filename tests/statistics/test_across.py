"""Rows across settings, against scipy, scikit-posthocs and counts made by hand."""

import numpy as np
import pytest
from scipy import stats

from fedbench_boards.statistics import across


def settings_of(means, noise=0.0, seeds=4):
    """Setting -> row -> seed -> score, with a zigzag of ``noise`` that differs by row."""
    return {
        f"s{i}": {
            f"r{j}": {seed: mean + noise * (-1) ** (seed + j) * (1 + (1 + j) * seed / 10) for seed in range(seeds)}
            for j, mean in enumerate(row)
        }
        for i, row in enumerate(means)
    }


MEANS = [[70, 60, 50, 40], [66, 68, 51, 40], [80, 70, 71, 60], [50, 40, 30, 45], [61, 60, 58, 50]]


def test_ranks_and_friedman_are_scipys():
    found = across(settings_of(MEANS))
    assert found is not None
    assert list(found.mean_ranks.index) == ["r0", "r1", "r2", "r3"]
    assert found.mean_ranks["r0"] == pytest.approx((1 + 2 + 1 + 1 + 1) / 5)
    expected = stats.friedmanchisquare(*np.array(MEANS).T).pvalue
    assert found.p_value == pytest.approx(expected, rel=1e-12)


def test_the_critical_difference_is_that_of_nemenyis_table():
    # Demsar 2006, table 5: q = 2.569 for four rows; 2.569 sqrt(4 * 5 / (6 * 5))
    found = across(settings_of(MEANS))
    assert found is not None
    assert found.critical_difference == pytest.approx(2.569 * (20 / 30) ** 0.5, abs=1e-3)


def test_rows_further_apart_than_it_are_those_that_scikit_posthocs_tells_apart():
    posthocs = pytest.importorskip("scikit_posthocs")
    found = across(settings_of(MEANS * 2))
    assert found is not None
    p = posthocs.posthoc_nemenyi_friedman(found.ranks.reset_index(drop=True))
    ranks = found.ranks.mean()
    for ours in ranks.index:
        for theirs in ranks.index:
            if ours != theirs:
                apart = abs(ranks[ours] - ranks[theirs]) > found.critical_difference
                assert apart == (p.loc[ours, theirs] < 0.05)


def test_wins_ties_and_losses_are_of_significant_differences():
    # noise of 0.1 between rows of opposite sign: a point is significant, 0.05 is not
    found = across(settings_of([[60, 59, 50], [60, 60.05, 50], [50, 59, 50]], noise=0.1))
    assert found is not None
    assert found.outcomes.loc["r0"].tolist() == [3, 2, 1]  # beats r1 and r2, then r2; ties r1, then r2; loses to r1
    assert found.against.loc["r0", "r1"] == 0 and found.against.loc["r1", "r2"] == 3
    assert found.outcomes.to_numpy().sum() == 3 * 3 * 2


def test_numbers_that_no_seed_moves_win_where_they_differ():
    found = across(settings_of([[2, 1, 1]] * 3))
    assert found is not None and found.outcomes.loc["r1"].tolist() == [0, 3, 3]
    assert found.p_value < 0.1


def test_the_score_over_settings_has_the_interval_of_its_seeds():
    given = {
        f"s{i}": {f"r{j}": {seed: float(10 * i + j + seed**2) for seed in range(3)} for j in range(3)} for i in range(3)
    }
    found = across(given)
    assert found is not None
    by_seed = [10 + 1 + seed**2 for seed in range(3)]
    low, high = stats.t.interval(0.95, 2, loc=np.mean(by_seed), scale=stats.sem(by_seed))
    assert found.scores.loc["r1"].tolist() == pytest.approx([np.mean(by_seed), low, high])


def test_only_rows_of_every_setting_are_compared_and_few_are_not():
    given = settings_of(MEANS)
    del given["s1"]["r2"]
    found = across(given)
    assert found is not None and list(found.ranks) == ["r0", "r1", "r3"]
    assert across(dict(list(given.items())[:2])) is None
    assert found.seeds == (0, 1, 2, 3)
    given["s3"]["r1"] = {7: 1.0, 3: 2.0}
    fewer = across(given)
    assert fewer is not None and fewer.seeds == (3,)
    del given["s0"]["r1"]
    assert across(given) is None


def test_rows_that_tie_everywhere_do_not_differ():
    found = across(settings_of([[5, 5, 5]] * 4))
    assert found is not None and found.p_value == 1.0

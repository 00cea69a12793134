"""Paired tests and Holm's correction, against scipy, closed forms and counts made by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from fedbench_boards.statistics import EQUAL, Test, holm, paired, verdict

ZEROS = [0.0] * 20


def test_the_t_test_of_three_pairs_agrees_with_its_closed_form_and_with_scipy():
    ours, theirs = [61.0, 64.0, 70.0], [60.0, 62.0, 67.0]
    # differences 1, 2, 3: mean 2, sample std 1, t = 2 / (1 / sqrt 3) = sqrt 12; two degrees of freedom:
    # p = 1 - t / sqrt(t^2 + 2) = 1 - sqrt(12 / 14) = 0.0742; unpaired it would be 0.6
    outcome = paired(ours, theirs)
    assert outcome.p_value == pytest.approx(1 - math.sqrt(12 / 14), rel=1e-12)
    assert outcome.p_value == pytest.approx(stats.ttest_1samp([1.0, 2.0, 3.0], 0).pvalue, rel=1e-12)
    assert outcome.reason == ""


def test_the_t_test_is_that_of_scipy_bit_for_bit():
    draws = np.random.default_rng(0)
    for count in (3, 4, 5, 8, 11) * 20:
        ours = np.round(draws.normal(50, 5, count), 3)
        theirs = np.round(ours + draws.normal(0.5, 1, count), 3)
        assert paired(list(ours), list(theirs)).p_value == stats.ttest_rel(ours, theirs).pvalue


def test_it_is_two_sided():
    assert paired([1.0, 2.0, 3.0], ZEROS[:3]).p_value == pytest.approx(paired(ZEROS[:3], [1.0, 2.0, 3.0]).p_value)


@pytest.mark.parametrize("pairs", [0, 1, 2])
def test_too_few_seeds_have_no_p_value_and_say_how_many_are_needed(pairs):
    outcome = paired([70.0] * pairs, [60.0, 61.0][:pairs])
    assert math.isnan(outcome.p_value) and outcome.reason == f"needs 3 seeds, has {pairs}"


def test_wilcoxon_needs_six_pairs_since_five_cannot_be_significant():
    assert paired([1.0, 2.0, 3.0, 4.0, 5.0], ZEROS[:5], Test.wilcoxon).reason == "needs 6 seeds, has 5"
    # all of 2^6 = 64 signs are as likely; all plus and all minus are as extreme: 2 / 64
    assert paired([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], ZEROS[:6], Test.wilcoxon).p_value == pytest.approx(2 / 64)
    # the smallest is negative: rank sum 1; sums 0 and 1 occur once each, on both sides: 4 / 64
    assert paired([-1.0, 2.0, 3.0, 4.0, 5.0, 6.0], ZEROS[:6], Test.wilcoxon).p_value == pytest.approx(4 / 64)


def test_wilcoxon_is_exact_with_ties():
    # sizes 1 1 1 1 2 2 have ranks 2.5 (four times) and 5.5 (twice); the negative ones sum to 2.5.
    # At most 2.5: no negative (1 way) or one of the four (4 ways); both sides: 2 * 5 / 64
    assert paired([1.0, 1.0, 1.0, -1.0, 2.0, 2.0], ZEROS[:6], Test.wilcoxon).p_value == pytest.approx(10 / 64)


def test_wilcoxon_leaves_out_pairs_without_a_difference():
    outcome = paired([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], ZEROS[:6], Test.wilcoxon)
    assert math.isnan(outcome.p_value) and outcome.reason == "needs 6 seeds that differ, has 5"
    seven = paired([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], ZEROS[:7], Test.wilcoxon)
    assert seven.p_value == pytest.approx(2 / 64)


def test_ties_among_too_many_differences_to_try_all_signs_have_no_p_value():
    outcome = paired([1.0, 1.0, *range(2, 17)], ZEROS[:17], Test.wilcoxon)
    assert math.isnan(outcome.p_value) and outcome.reason == "ties among more than 16 differences"


@pytest.mark.parametrize("test", list(Test))
@pytest.mark.parametrize("difference", [0.0, 0.1])
def test_differences_without_variance_have_no_p_value(test, difference):
    # 60.1 - 60 and 67.1 - 67 differ in the last bit
    theirs = [60.0, 62.0, 67.0, 61.0, 63.0, 64.0]
    outcome = paired([number + difference for number in theirs], theirs, test)
    assert math.isnan(outcome.p_value) and outcome.reason == EQUAL


def test_holm_multiplies_step_by_step_and_never_falls():
    # sorted 0.005 * 4 = 0.02, 0.01 * 3 = 0.03, 0.03 * 2 = 0.06, 0.04 * 1 = 0.04, but not below 0.06.
    # Bonferroni would give 0.04, 0.16, 0.12, 0.02
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_holm_stops_at_one_and_leaves_a_single_p_value_alone():
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


def test_the_level_is_five_percent_and_five_percent_is_not_below_it():
    assert (verdict(0.049), verdict(0.05)) == ("significant", "not significant")

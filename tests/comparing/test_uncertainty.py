"""Intervals of paired differences, p-values, and their correction for several methods."""

import pytest
from scipy import stats

from fedhet.comparing.uncertainty import Difference, holm, paired_difference


def test_paired_differences_are_students_test():
    mine, theirs = {0: 0.6, 1: 0.65, 2: 0.9, 5: 0.1}, {0: 0.5, 1: 0.6, 2: 0.7, 3: 0.9}
    found, expected = paired_difference(mine, theirs), stats.ttest_1samp([0.1, 0.05, 0.2], 0)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-6)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_p_is_below_5_percent_where_the_interval_leaves_0_out():
    found = [Difference(mean / 100, 4, 0.0004) for mean in range(-12, 13)]
    significant = [each.p < 0.05 for each in found]
    assert 5 < sum(significant) < 20
    assert significant == [not each.low <= 0 <= each.high for each in found]
    assert [Difference(mean, 3, 0.0).p for mean in (0.0, 0.1)] == [1.0, 0.0]


def test_two_seeds_have_no_interval():
    assert paired_difference({0: 0.5, 1: 0.5}, {0: 0.25, 1: 0.5}) == Difference(0.125, 2)
    assert Difference(0.125, 2).p is Difference(0.125, 2).low is None


def test_holms_correction():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []

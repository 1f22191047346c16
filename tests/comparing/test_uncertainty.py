"""Intervals over seeds and test examples, p-values, and their correction for several methods."""

import numpy as np
import pytest
from scipy import stats

from fedhet.comparing.uncertainty import Scores, holm, minus, paired_difference, scores_of, shared_variance
from fedhet.predictions import Predictions

SEEDS = range(4)


def differences(rng, examples, effect=0.05, by_example=0.0, by_seed=0.02):
    """Made-up differences of two methods: of the seeds' luck, of the examples' own, and of chance."""
    own = np.random.default_rng(int(examples[0])).normal(0, by_example, len(examples))
    return Scores(examples, effect + rng.normal(0, by_seed) + own + rng.normal(0, 0.1, len(examples)))


def difference(scores, shared=True):
    means = {seed: each.values.mean() for seed, each in scores.items()}
    return paired_difference(means, dict.fromkeys(means, 0.0), scores if shared else None)


def test_without_known_examples_it_is_students_test():
    mine, theirs = {0: 0.6, 1: 0.65, 2: 0.9, 5: 0.1}, {0: 0.5, 1: 0.6, 2: 0.7, 3: 0.9}
    found, expected = paired_difference(mine, theirs), stats.ttest_1samp([0.1, 0.05, 0.2], 0)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-6)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert found.widening is None


def test_seeds_that_agree_on_every_example_share_all_of_the_examples_variance():
    """That is the variance of a mean by the bootstrap, here with draws."""
    rng = np.random.default_rng(0)
    values = rng.choice([-1.0, 0.0, 1.0], 300, p=[0.1, 0.6, 0.3])
    shared = shared_variance([Scores(np.arange(300), values)] * 3)
    drawn = [rng.choice(values, 300).mean() for _ in range(4000)]
    assert shared == pytest.approx(values.var() / 300)
    assert shared == pytest.approx(np.var(drawn), rel=0.1)


def test_examples_are_known_by_their_numbers_and_not_by_their_places():
    rng = np.random.default_rng(1)
    one = Scores(np.arange(50), rng.normal(size=50))
    order = rng.permutation(50)
    turned = Scores(order, one.values[order])
    assert shared_variance([one, turned]) == pytest.approx(shared_variance([one, one]))
    assert shared_variance([one, Scores(np.arange(50) + 50, one.values)]) == 0
    half = Scores(np.arange(25, 75), np.concatenate([one.values[25:], one.values[:25]]))
    assert 0 <= shared_variance([one, half]) < shared_variance([one, one])


def test_an_example_that_several_clients_have_is_drawn_once():
    """Clients that all have the same test examples add nothing to what one of them knows."""
    values = np.random.default_rng(2).normal(size=40)
    one, three = Scores(np.arange(40), values), Scores(np.tile(np.arange(40), 3), np.tile(values, 3))
    assert shared_variance([three, three]) == pytest.approx(shared_variance([one, one]))
    assert shared_variance([three, one]) == pytest.approx(shared_variance([one, one]))


@pytest.mark.parametrize("split", ["given", "drawn"])
def test_the_interval_covers_the_difference_whether_seeds_share_their_test_examples_or_not(split):
    """Of 400 comparisons over four seeds; by seeds alone, shared examples are taken for a difference much too often."""
    covered, alone, widened = 0, 0, []
    for number in range(400):
        rng = np.random.default_rng([number, 1])
        parts = {seed: np.arange(100) + 10**6 * number + (1000 * seed if split == "drawn" else 0) for seed in SEEDS}
        scores = {seed: differences(rng, part, by_example=0.5) for seed, part in parts.items()}
        found, by_seeds = difference(scores), difference(scores, shared=False)
        covered += found.low <= 0.05 <= found.high
        alone += by_seeds.low <= 0.05 <= by_seeds.high
        widened.append(found.widening)
        assert found.high - found.low >= by_seeds.high - by_seeds.low
    assert covered >= 0.92 * 400
    if split == "given":
        assert alone < 0.75 * 400
        assert np.median(widened) > 0.5
    else:
        assert alone >= 0.92 * 400
        assert widened == [0.0] * 400


def test_p_is_below_5_percent_exactly_where_the_interval_leaves_0_out():
    found = [
        difference({seed: differences(rng, np.arange(100), effect, 0.2) for seed in SEEDS})
        for rng in map(np.random.default_rng, range(60))
        for effect in (0.0, 0.06)
    ]
    significant = [each.p < 0.05 for each in found]
    assert 10 < sum(significant) < 110
    assert significant == [not each.low <= 0 <= each.high for each in found]
    assert paired_difference({0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5}).p == 1
    assert paired_difference({0: 0.5}, {0: 0.25}).p is None


def test_holms_correction_is_that_of_the_textbook():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_the_mean_over_examples_is_the_accuracy():
    parts = {
        "0": Predictions(np.arange(3), np.array([True, True, False]), 3),
        "1": Predictions(np.array([3]), np.array([True]), 1),
    }
    own = scores_of(parts, common=False)
    assert (own.examples.tolist(), own.values.mean()) == ([0, 1, 2, 3], 0.75)
    common = {
        name: Predictions(np.arange(3), each, weight)
        for name, each, weight in zip("01", np.eye(2, 3) > 0, (1, 3), strict=True)
    }
    assert scores_of(common, common=True).values.tolist() == [0.25, 0.75, 0.0]
    none = {name: Predictions(each.examples, each.right, 0) for name, each in common.items()}
    assert scores_of(none, common=True, trained_on={"0": 3, "1": 1}).values.tolist() == [0.75, 0.25, 0.0]
    assert scores_of({}, common=True) is None
    assert minus(own, own).values.tolist() == [0.0] * 4
    assert minus(own, scores_of(common, common=True)) is None

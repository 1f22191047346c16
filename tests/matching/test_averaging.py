"""Averages of last layers."""

import numpy as np

from fedhet.matching import class_weighted_average


def test_classes_are_averaged_by_who_holds_them():
    weights = [np.full((3, 2), 1.0), np.full((3, 2), 4.0)]
    counts = [[30, 0, 0], [10, 5, 0]]
    expected = [[1.75, 1.75], [4, 4], [0, 0]]
    np.testing.assert_allclose(class_weighted_average(weights, counts), expected)
    np.testing.assert_allclose(class_weighted_average([w[:, 0] for w in weights], counts), [1.75, 4, 0])

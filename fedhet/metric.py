"""A metric as a value that adds: numbers with their weights."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A metric by label, and how much each weighs; of several clients, `total` is their metric together.

    Attributes:
        values: one number for each label, target or class of a segmentation; a single one for accuracy.
        weights: how much each counts, as many numbers: predictions for accuracy and R2; for AUC the pairs of an example
            that has the label and one that lacks it; for IoU the pixels of the union. 0 where it is undefined.
    """

    values: tuple[float, ...]
    weights: tuple[float, ...]

    @property
    def value(self) -> float:
        """Plain mean over the labels that weigh anything; nan without one."""
        defined = [value for value, weight in zip(self.values, self.weights, strict=True) if weight > 0]
        return math.fsum(defined) / len(defined) if defined else math.nan

    @staticmethod
    def total(metrics: Iterable["Metric"]) -> "Metric":
        """Return for each label the mean weighted over those with a weight, and the total weight.

        For AUC a pair is of one client: outputs are only ranked among its own. Raises `ValueError` for other labels.
        """
        values, weights = [], []
        pairs = (zip(each.values, each.weights, strict=True) for each in metrics)
        for label in map(list, zip(*pairs, strict=True)):
            weights.append(math.fsum(weight for _, weight in label))
            # A value that weighs nothing is nan, and nan * 0 is not 0.
            won = math.fsum(value * weight for value, weight in label if weight > 0)
            values.append(won / weights[-1] if weights[-1] else math.nan)
        return Metric(tuple(values), tuple(weights))

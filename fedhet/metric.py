"""A metric with its weights, so that metrics of several clients can be added."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A metric by label, with a weight for each; `total` is the metric of several clients together.

    Attributes:
        values: one number for each label, target or class of a segmentation; a single one for accuracy.
        weights: the weight of each value, 0 if it is undefined: the number of predictions for accuracy and R2; of pairs
            of an example with the label and one without for AUC; of pixels of the union for IoU.
    """

    values: tuple[float, ...]
    weights: tuple[float, ...]

    @property
    def value(self) -> float:
        """The plain mean over labels with a weight above 0; nan without any."""
        defined = [value for value, weight in zip(self.values, self.weights, strict=True) if weight > 0]
        return math.fsum(defined) / len(defined) if defined else math.nan

    @staticmethod
    def total(metrics: Iterable["Metric"]) -> "Metric":
        """Return the weighted mean and the total weight for each label.

        For AUC, only examples of the same client are ranked. Raises a `ValueError` if numbers of labels differ.
        """
        values, weights = [], []
        pairs = (zip(each.values, each.weights, strict=True) for each in metrics)
        for label in map(list, zip(*pairs, strict=True)):
            weights.append(math.fsum(weight for _, weight in label))
            # A value with weight 0 is nan, and nan * 0 is not 0.
            won = math.fsum(value * weight for value, weight in label if weight > 0)
            values.append(won / weights[-1] if weights[-1] else math.nan)
        return Metric(tuple(values), tuple(weights))

"""Paired differences between methods over seeds: intervals by Student's t, and p-values corrected for their number."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
FEWEST = 3
"""The fewest seeds with an interval: that of two is about thirteen times as wide as their difference."""


@dataclass(frozen=True)
class Difference:
    """A paired difference between two methods: mean over seeds, and the mean's variance if there are enough seeds."""

    mean: float
    seeds: int
    variance: float | None = None

    @property
    def low(self) -> float | None:
        """The lower end of the confidence interval (`CONFIDENCE`), or None if the variance is unknown."""
        return None if (margin := self._margin) is None else self.mean - margin

    @property
    def high(self) -> float | None:
        """The upper end of the confidence interval (`CONFIDENCE`), or None if the variance is unknown."""
        return None if (margin := self._margin) is None else self.mean + margin

    @property
    def _margin(self) -> float | None:
        if self.variance is None:
            return None
        from scipy import special

        return float(special.stdtrit(self.seeds - 1, (1 + CONFIDENCE) / 2)) * math.sqrt(self.variance)

    @property
    def p(self) -> float | None:
        """The p-value of a paired t-test against no difference, or None if the variance is unknown."""
        if self.variance is None:
            return None
        if not self.variance:
            return 0.0 if self.mean else 1.0
        from scipy import special

        return 2 * float(special.stdtr(self.seeds - 1, -abs(self.mean) / math.sqrt(self.variance)))

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:+.3f}, {self.high:+.3f}]"
        return f"{self.mean:+.3f}{interval}"


def paired_difference(mine: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Return the difference `mine` - `theirs`, paired over the seeds that both have, or None without a common seed."""
    differences = [value - theirs[seed] for seed, value in mine.items() if seed in theirs]
    if not differences:
        return None
    seeds, mean = len(differences), statistics.fmean(differences)
    return Difference(mean, seeds, statistics.variance(differences) / seeds if seeds >= FEWEST else None)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple comparisons by Holm's method (Scandinavian Journal of Statistics 6, 1979)."""
    corrected, least = [0.0] * len(p_values), 0.0
    for place, index in enumerate(np.argsort(p_values, kind="stable").tolist()):
        least = max(least, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = least
    return corrected

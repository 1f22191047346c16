"""How sure differences between methods are: intervals over seeds and test examples, and p-values for several methods.

A run's accuracy is a mean over test examples. Where several seeds are tested on the same examples (`test-split =
given`), their differences share the luck of these examples, which the spread over seeds does not show: with variance
s^2 over S seeds and mean covariance c of two seeds through examples that both have, the mean over seeds has the
variance s^2 / S + c. The covariance is that of a bootstrap over test examples, without drawing any (Efron and
Tibshirani, An Introduction to the Bootstrap, 1993, 5.2); seeds that have no example in common have none.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedhet.predictions import Predictions

CONFIDENCE = 0.95
FEWEST = 3
"""Fewer seeds have no interval in tables: Student's of two is about thirteen times as wide as their difference."""


class Scores(NamedTuple):
    """A number for each test example of a run, as `Predictions` knows them: (n,) int64 and (n,) float64."""

    examples: NDArray[np.int64]
    values: NDArray[np.float64]


def scores_of(
    predictions: Mapping[str, Predictions], *, common: bool, trained_on: Mapping[str, int] = MappingProxyType({})
) -> Scores | None:
    """By test example how far a run is right, so that the mean is its accuracy; None without any.

    On the `common` test set it is the share of clients, weighted by their test examples, or if one of them has none, by
    the examples that they are `trained_on`; else every client has its own.
    """
    parts = list(predictions.values())
    if not parts:
        return None
    if not common:
        return Scores(*(np.concatenate(each) for each in zip(*((p.examples, p.right) for p in parts), strict=True)))
    if any(not np.array_equal(part.examples, parts[0].examples) for part in parts):
        return None
    weights = [part.weight for part in parts]
    if not all(weights):
        weights = [trained_on.get(client, 0) for client in predictions]
    return Scores(parts[0].examples, np.average([p.right for p in parts], axis=0, weights=weights))


def minus(mine: Scores | None, theirs: Scores | None) -> Scores | None:
    """The differences of two runs with the same test examples; None if they have others."""
    if mine is None or theirs is None or not np.array_equal(mine.examples, theirs.examples):
        return None
    return Scores(mine.examples, mine.values.astype(float) - theirs.values)


def shared_variance(seeds: Sequence[Scores]) -> float:
    """The mean covariance, at least 0, that two seeds' means have through test examples that both have."""
    pairs = [_covariance(one, other) for one, other in itertools.combinations(seeds, 2)]
    return max(0.0, statistics.fmean(pairs)) if pairs else 0.0


def _covariance(one: Scores, other: Scores) -> float:
    """The covariance of two means by the bootstrap, which draws an example for all clients that have it."""
    shares = []
    for each in (one, other):
        examples, places = np.unique(each.examples, return_inverse=True)
        shares.append((examples, np.bincount(places, each.values - each.values.mean()) / len(each.values)))
    (mine, by_mine), (theirs, by_theirs) = shares
    _, here, there = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
    return float((by_mine[here] * by_theirs[there]).sum())


@dataclass(frozen=True)
class Difference:
    """A paired difference between two methods.

    Attributes:
        mean: over seeds.
        seeds: their number.
        variance: of the mean, by the spread over seeds; None where they are too few.
        shared: variance that the seeds share through their test examples; None if these are not known.
    """

    mean: float
    seeds: int
    variance: float | None = None
    shared: float | None = None

    def margin(self, p: float = 1 - CONFIDENCE) -> float | None:
        """Half the width of the interval of confidence 1 - p; None without `variance`.

        The margins of both variances, by Student's t and by the normal distribution, are put together as the roots of
        independent squares (Zou and Donner, Statistics in Medicine 27, 2008).
        """
        if self.variance is None:
            return None
        from scipy import special

        quantiles = float(special.stdtrit(self.seeds - 1, p / 2)), float(special.ndtri(p / 2))
        return math.hypot(quantiles[0] * math.sqrt(self.variance), quantiles[1] * math.sqrt(self.shared or 0.0))

    @property
    def low(self) -> float | None:
        """The lower end of the interval (`CONFIDENCE`); None without `variance`."""
        return None if (margin := self.margin()) is None else self.mean - margin

    @property
    def high(self) -> float | None:
        """The upper end."""
        return None if (margin := self.margin()) is None else self.mean + margin

    def __str__(self) -> str:
        """The difference and its interval, `+0.038 [+0.003, +0.072]`, as far as it has one."""
        interval = "" if self.low is None else f" [{self.low:+.3f}, {self.high:+.3f}]"
        return f"{self.mean:+.3f}{interval}"

    @property
    def widening(self) -> float | None:
        """How much wider the test examples make the interval than seeds alone do, 0 for not at all; None if unknown."""
        if self.shared is None or not self.variance:
            return None
        margin, alone = self.margin(), Difference(self.mean, self.seeds, self.variance).margin()
        return None if margin is None or not alone else margin / alone - 1

    @property
    def p(self) -> float | None:
        """The p-value of no difference: 1 - the greatest confidence that leaves 0 out; None without `variance`."""
        if self.variance is None:
            return None
        if not self.mean or not (self.variance or self.shared):
            return 0.0 if self.mean else 1.0
        low, high = 1e-12, 1.0
        for _ in range(60):  # bisection on a logarithmic scale: the margin falls as p rises
            middle = math.sqrt(low * high)
            low, high = (middle, high) if (self.margin(middle) or 0.0) > abs(self.mean) else (low, middle)
        return high


def paired_difference(
    mine: Mapping[int, float],
    theirs: Mapping[int, float],
    scores: Mapping[int, Scores | None] | None = None,
    *,
    fewest: int = 2,
) -> Difference | None:
    """Return `mine` minus `theirs`, paired over their common seeds; None without any.

    With `scores`, the differences by test example for each seed, intervals cover test examples, too. With fewer than
    `fewest` seeds there is no interval.
    """
    differences = {seed: value - theirs[seed] for seed, value in mine.items() if seed in theirs}
    if not differences:
        return None
    seeds, mean = len(differences), statistics.fmean(differences.values())
    if seeds < fewest:
        return Difference(mean, seeds)
    known = [by_example for seed in differences if (by_example := (scores or {}).get(seed)) is not None]
    shared = shared_variance(known) if len(known) == seeds else None
    return Difference(mean, seeds, statistics.variance(differences.values()) / seeds, shared)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number, in their order (Holm, Scandinavian Journal of Statistics 6, 1979)."""
    corrected, least = [0.0] * len(p_values), 0.0
    for place, index in enumerate(np.argsort(p_values, kind="stable").tolist()):
        least = max(least, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = least
    return corrected

"""Averages that some Byzantine clients cannot carry away, and a bound on how far one client goes in a round.

The rules are Flower's own: the median and the trimmed mean of each entry (Yin et al., ICML 2018), Krum and Multi-Krum
(Blanchard et al., NeurIPS 2017), which take whole clients; beside them the mean of updates that are cut to their median
norm. All but the mean count every client the same, whatever number of examples it tells.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from fedhet.options import Config
from fedhet.server.aggregation import weighted_average
from fedhet.wire import Arrays, Spec

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rule:
    """How what clients sent is put together.

    Attributes:
        name: one of `fedhet.options.AGGREGATIONS`.
        byzantine: the share of clients that may be Byzantine, which trimmed-mean, krum and multi-krum are told.
        bound: updates of more than so many median norms are cut to that; 0: none is.
    """

    name: str = "mean"
    byzantine: float = 0.0
    bound: float = 0.0

    @classmethod
    def of(cls, config: Config) -> "Rule":
        """That of a configuration."""
        clipped = config.aggregation == "norm-clipped"
        return cls(config.aggregation, config.byzantine, config.clip_norm or (1.0 if clipped else 0.0))

    @property
    def plain(self) -> bool:
        """Whether it is the mean and nothing else."""
        return self.name == "mean" and not self.bound


@dataclass(frozen=True)
class Cut:
    """An update that was cut: its norm, and the norm that it was cut to."""

    client: str
    norm: float
    to: float


def cut_to_bound(models: Mapping[str, Arrays], before: Arrays, bound: float) -> tuple[dict[str, Arrays], list[Cut]]:
    """Cut every update whose norm is more than `bound` times the median of all.

    The norm is over all floating arrays of a client, BatchNorm's statistics included, divided by the root of their
    number of entries, so that small networks and large ones can be compared.
    """
    norms = {client: _norm(arrays, before) for client, arrays in models.items()}
    most = bound * median(norms.values())
    cuts = [Cut(client, norm, most) for client, norm in norms.items() if norm > most]
    made = dict(models)
    for cut in cuts:
        made[cut.client] = {
            name: _toward(array, before.get(name), cut.to / cut.norm) for name, array in models[cut.client].items()
        }
    return made, cuts


def combined(groups: Sequence[Arrays], weights: Sequence[float], spec: Spec, rule: Rule) -> Arrays:
    """Equal groups of arrays, one a client, put together by a rule.

    Args:
        groups: at least one.
        weights: one a client, for the mean.
        spec: shapes and dtypes of the result.
        rule: how; of fewer than three clients the median is the mean of both, and Krum takes the first.
    """
    from flwr.server.strategy.aggregate import aggregate_krum, aggregate_median, aggregate_trimmed_avg

    if rule.name in ("mean", "norm-clipped"):
        return weighted_average(groups, weights if rule.name == "mean" else [1.0] * len(groups), spec)
    count = len(groups)
    # Fewer than half of all, or no rule helps; at least one where any are expected.
    byzantine = min(math.ceil(rule.byzantine * count), (count - 1) // 2)
    each = [([group[name].astype(np.float64) for name in spec], 1) for group in groups]
    if rule.name == "median":
        found = aggregate_median(each)
    elif rule.name == "trimmed-mean":
        found = aggregate_trimmed_avg(each, (byzantine + 0.1) / count)
    else:
        found = aggregate_krum(each, byzantine, 0 if rule.name == "krum" else count - byzantine)
    return {name: _as(array, dtype) for (name, (_, dtype)), array in zip(spec.items(), found, strict=True)}


def _as(array: Array, dtype: str) -> Array:
    return (array if np.dtype(dtype).kind == "f" else np.rint(array)).astype(dtype)


def _toward(array: Array, before: Array | None, share: float) -> Array:
    """A part of the way from where an array was; whole numbers stay what they are."""
    if array.dtype.kind != "f":
        return array
    start = 0.0 if before is None else before.astype(np.float64)
    return (start + share * (array.astype(np.float64) - start)).astype(array.dtype)


def _norm(arrays: Arrays, before: Arrays) -> float:
    squares, entries = 0.0, 0
    for name, array in arrays.items():
        if array.dtype.kind == "f":
            moved = array.astype(np.float64) - before.get(name, 0.0)
            squares, entries = squares + float(np.vdot(moved, moved)), entries + array.size
    return math.sqrt(squares / entries) if entries else 0.0

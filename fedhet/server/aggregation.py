"""Averages of what clients send."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from fedhet.wire import Arrays, Reply, Spec, WireError, as_read

Average = Callable[[Sequence[Arrays], Sequence[float], Spec], Arrays]


def weighted_average(groups: Sequence[Arrays], weights: Sequence[float], spec: Spec) -> Arrays:
    """The weighted mean of equal groups of arrays, summed in the order given.

    Args:
        groups: one group of arrays a client, with the same names and shapes.
        weights: one weight a client; they are divided by their sum.
        spec: shapes and dtypes of the result. float32 and float64 are summed in their own precision, narrower floats in
            float32, integers (BatchNorm's counters) in float64 and rounded.
    """
    total = float(sum(weights))
    average: Arrays = {}
    for name, (shape, dtype) in spec.items():
        mean = _zeros(shape, dtype)
        for group, weight in zip(groups, weights, strict=True):
            mean.add_(as_read(group[name]), alpha=weight / total)
        average[name] = _rounded(mean, dtype)
    return average


def average_shared(
    models: Mapping[str, Arrays],
    weights: Mapping[str, float],
    specs: Mapping[str, Spec],
    average: Average = weighted_average,
) -> Arrays:
    """The weighted mean of each shared key, or another average of it, over the clients that sent it.

    Args:
        models: what each client sent, in the order in which it is summed.
        weights: of each client.
        specs: shapes and dtypes of each client's keys.
        average: of equal groups of arrays with a weight each.
    """
    owners: dict[tuple[str, ...], Spec] = {}
    for name in dict.fromkeys(key for client in models for key in specs[client]):
        having = tuple(client for client in models if name in models[client])
        if having:
            owners.setdefault(having, {})[name] = specs[having[0]][name]
    found: Arrays = {}
    for having, spec in owners.items():
        found |= average([models[c] for c in having], [weights[c] for c in having], spec)
    return found


class RunningMean:
    """A weighted mean of groups of arrays that are taken in one by one, so that nobody holds them all.

    The sum is divided at the end, by the weights of those that came; its rounding differs from `weighted_average`'s.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._weights: dict[str, float] = {}
        self._spec: Spec = {}

    def add(self, arrays: Arrays, weight: float, spec: Spec) -> None:
        """Take in one group; a name that others lack is averaged over those who have it."""
        for name, array in arrays.items():
            if name not in self._sums:
                self._spec[name], self._weights[name] = spec[name], 0.0
                self._sums[name] = _zeros(*spec[name])
            self._sums[name].add_(as_read(array), alpha=weight)
            self._weights[name] += weight

    def mean(self) -> Arrays:
        """The mean of all that was taken in; afterwards nothing is."""
        found: Arrays = {}
        for name in list(self._sums):
            found[name] = _rounded(self._sums.pop(name).div_(self._weights[name]), self._spec[name][1])
        return found


def class_means(sent: Sequence[Arrays], known: Arrays) -> Arrays:
    """Means of vectors by class, over clients and weighted by their numbers of examples.

    Args:
        sent: of each client `classes` (k,) int64, `means` (k, d) float32 and `counts` (k,) int64.
        known: `classes` and `means` as they were; a class that nobody sent keeps its mean. May be empty.

    Returns:
        `classes`, ascending, and `means` (k, d) float32.
    """
    classes, of = np.unique(np.concatenate([own["classes"] for own in sent]), return_inverse=True)
    counts = np.concatenate([own["counts"] for own in sent]).astype(np.float64)
    sums = np.zeros((len(classes), sent[0]["means"].shape[1]))
    np.add.at(sums, of, np.concatenate([own["means"] for own in sent]) * counts[:, None])
    means = sums / np.bincount(of, counts)[:, None]
    if known:
        kept = ~np.isin(known["classes"], classes)
        classes = np.concatenate([classes, known["classes"][kept]])
        means = np.concatenate([means, known["means"][kept]])
    order = np.argsort(classes)
    return {"classes": classes[order], "means": means[order].astype(np.float32)}


def check_class_counts(counts: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]", reply: Reply) -> None:
    """Check how many examples of each class a client says to have, (classes,) int64.

    Raises:
        WireError: some are negative, or they are not those of its training examples.
    """
    if counts.min(initial=0) < 0:
        raise WireError("its class counts are negative")
    if counts.sum(dtype=float) != reply.examples:
        raise WireError(
            f"its class counts are of {counts.sum(dtype=float):g} examples, and it trains on {reply.examples}"
        )


def _zeros(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    whole = np.dtype(dtype).kind != "f"
    return torch.zeros(shape, dtype=torch.float64 if whole or dtype == "float64" else torch.float32)


def _rounded(mean: torch.Tensor, dtype: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    if np.dtype(dtype).kind != "f":
        mean.round_()
    return mean.numpy().astype(dtype, copy=False)

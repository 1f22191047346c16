"""Aggregation of what clients send: averages, Byzantine-robust rules, and clipping."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar, cast

import numpy as np
import torch

from fedhet.flower.rules import robust
from fedhet.representations.packing import check_received_features, unpack
from fedhet.server.federation import Federation
from fedhet.server.parts import Parts, cut, joined, split
from fedhet.server.run import Run
from fedhet.wire import Arrays, Reply, Spec, WireError, check
from fedhet.wire import cast as cast_arrays

Array = np.ndarray[Any, Any]
K = TypeVar("K", bound=Hashable)


class Aggregator:
    """Averages what clients send, by the sharing map and the configured rule; notes clipped updates in the round."""

    def __init__(self, run: Run, federation: Federation) -> None:
        self.run, self.federation = run, federation
        self._sent: tuple[Arrays, dict[tuple[tuple[str, ...], int], tuple[Parts, Arrays]]] = ({}, {})

    @property
    def bound(self) -> float:
        """The number of median norms to which larger updates are clipped; 0 for no clipping."""
        config = self.run.config
        return config.clip_norm or (1.0 if config.aggregation == "norm-clipped" else 0.0)

    @property
    def plain(self) -> bool:
        """Whether the configured rule is the mean, without clipping."""
        return self.run.config.aggregation == "mean" and not self.bound

    def average(
        self,
        models: Mapping[str, Arrays],
        weights: Mapping[str, float],
        specs: Mapping[str, Spec] | None = None,
        before: Arrays | None = None,
        parts: Mapping[str, Parts] | None = None,
    ) -> Arrays:
        """Average each shared key over the clients that have it, and parts entry by entry.

        Args:
            models: what each client sent, by shared key, in order of name.
            weights: each client's weight in the mean.
            specs: shapes and dtypes of each client's keys; by default those of its shared arrays.
            before: whole arrays from which the clients started; by default those of the state. An entry that no client
                has keeps its value.
            parts: the arrays of which each client sent a part; by default those of its parts in this round.
        """
        if parts is None:
            parts = {client: {} if specs else self.federation.parts(client) for client in models}
        before, config = self.run.state.model if before is None else before, self.run.config
        specs, rule = self.federation.specs if specs is None else specs, (config.aggregation, config.byzantine)
        models = self.clipped(models, before, parts)
        if not any(parts.values()):
            return average_shared(models, weights, specs, *rule)
        pieces, kinds, places = split(models, specs, parts, before)
        return joined(average_shared(pieces, weights, kinds, *rule), places, before)

    def average_arrays(self, groups: Mapping[str, Mapping[K, Array]]) -> dict[K, Array]:
        """Average float arrays that are no part of a network, each name over the clients that have it.

        Args:
            groups: arrays by client, in order of client name; all clients count the same.
        """
        specs = {c: {name: (array.shape, "float32") for name, array in arrays.items()} for c, arrays in groups.items()}
        averages: Any = self.average(cast(Any, groups), dict.fromkeys(groups, 1.0), cast(Any, specs), before={})
        return cast(dict[K, Array], averages)

    def clipped(
        self,
        groups: Mapping[str, Arrays],
        before: Arrays | None = None,
        parts: Mapping[str, Parts] | None = None,
    ) -> Mapping[str, Arrays]:
        """Return what clients sent, clipped to `clip-norm` median norms if that is set.

        `before` and `parts` are as in `average`; arrays that are not in `before` started from zero.
        """
        if not self.bound or not groups:
            return groups
        clipped, cuts = cut_to_bound(groups, before or {}, self.bound, parts or {})
        self.run.round.name_cuts(cuts)
        return clipped

    def part_of(self, client: str) -> Arrays:
        """Return a client's part of the shared arrays, as it travels; clients with the same part share the object."""
        model, parts = self.run.state.model, self.federation.parts(client)
        if self._sent[0] is not model:
            self._sent = (model, {})
        keys, sent = (tuple(self.federation.specs.get(client, ())), id(parts) if parts else 0), self._sent[1]
        if keys not in sent:
            # The global model of a method that matches has other shapes than any client's, and the same names.
            part = model if self.run.traits.whole else {key: model[key] for key in keys[0] if key in model}
            sent[keys] = parts, cast_arrays(cut(part, parts), self.run.config.wire_dtype)
        return sent[keys][1]


# ---- averages


def average_shared(
    models: Mapping[str, Arrays],
    weights: Mapping[str, float],
    specs: Mapping[str, Spec],
    rule: str = "mean",
    byzantine: float = 0.0,
) -> Arrays:
    """Return the average of each shared key over the clients that sent it.

    Args:
        models: what each client sent, in the order in which it is summed.
        weights: each client's weight in the mean.
        specs: shapes and dtypes of each client's keys.
        rule: one of `fedhet.options.AGGREGATIONS`; all but `mean` count every client the same.
        byzantine: the fraction of clients that may be Byzantine, for the rules that need it.
    """
    owners: dict[tuple[str, ...], Spec] = {}
    for name in dict.fromkeys(key for client in models for key in specs[client]):
        having = tuple(client for client in models if name in models[client])
        if having:
            owners.setdefault(having, {})[name] = specs[having[0]][name]
    averages: Arrays = {}
    for having, spec in owners.items():
        groups = [models[client] for client in having]
        if rule in ("mean", "norm-clipped"):
            counts = [weights[client] if rule == "mean" else 1.0 for client in having]
            averages |= weighted_average(groups, counts, spec)
        else:
            arrays = robust([[group[name].astype(np.float64) for name in spec] for group in groups], rule, byzantine)
            for (name, (_, dtype)), array in zip(spec.items(), arrays, strict=True):
                averages[name] = _rounded(torch.from_numpy(np.asarray(array)), dtype)
    return averages


def weighted_average(groups: Sequence[Arrays], weights: Sequence[float], spec: Spec) -> Arrays:
    """Return the weighted mean of equal groups of arrays, summed in their order.

    Args:
        groups: one group of arrays for each client, with the same names and shapes.
        weights: one weight for each client; they are divided by their sum.
        spec: shapes and dtypes of the result. float32 and float64 are summed in their own precision, narrower floats in
            float32, integers (BatchNorm's counters) in float64 and rounded.
    """
    total = float(sum(weights))
    average: Arrays = {}
    for name, (shape, dtype) in spec.items():
        mean = _zeros(shape, dtype)
        for group, weight in zip(groups, weights, strict=True):
            mean.add_(torch.from_numpy(group[name]), alpha=weight / total)
        average[name] = _rounded(mean, dtype)
    return average


class RunningMean:
    """A weighted mean of groups of arrays that are added one by one, so that they are never all in memory.

    The sum is divided by the weights at the end, so it is rounded differently than `weighted_average`.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._weights: dict[str, float] = {}
        self._spec: Spec = {}

    def add(self, arrays: Arrays, weight: float, spec: Spec) -> None:
        """Add one group; a name that other groups lack is averaged over the groups that have it."""
        for name, array in arrays.items():
            if name not in self._sums:
                self._spec[name], self._weights[name] = spec[name], 0.0
                self._sums[name] = _zeros(*spec[name])
            self._sums[name].add_(torch.from_numpy(array), alpha=weight)
            self._weights[name] += weight

    def mean(self) -> Arrays:
        """Return the mean of all groups, and forget them."""
        means: Arrays = {}
        for name in list(self._sums):
            means[name] = _rounded(self._sums.pop(name).div_(self._weights[name]), self._spec[name][1])
        return means


def class_means(sent: Sequence[Arrays], known: Arrays) -> Arrays:
    """Return the mean vector of each class over clients, weighted by their numbers of examples.

    Args:
        sent: for each client `classes` (k,) int64, `means` (k, d) float32 and `counts` (k,) int64.
        known: the previous `classes` and `means`; a class that no client sent keeps its mean. May be empty.

    Returns:
        `classes`, ascending, and `means` (k, d) float32.
    """
    classes, rows = np.unique(np.concatenate([group["classes"] for group in sent]), return_inverse=True)
    counts = np.concatenate([group["counts"] for group in sent]).astype(np.float64)
    sums = np.zeros((len(classes), sent[0]["means"].shape[1]))
    np.add.at(sums, rows, np.concatenate([group["means"] for group in sent]) * counts[:, None])
    means = sums / np.bincount(rows, counts)[:, None]
    if known:
        kept = ~np.isin(known["classes"], classes)
        classes = np.concatenate([classes, known["classes"][kept]])
        means = np.concatenate([means, known["means"][kept]])
    order = np.argsort(classes)
    return {"classes": classes[order], "means": means[order].astype(np.float32)}


def packed_rows(reply: Reply, name: str, check: Callable[[torch.Tensor], object] | None = None) -> torch.Tensor:
    """Return rows (n, d) that a client packed; raises WireError if there are none, or `check` raises a ValueError."""
    if name not in reply.arrays:
        raise WireError(f"its {name} are missing")
    try:
        rows = unpack(reply.arrays[name])
        check_received_features(rows, name)
        if check:
            check(rows)
    except ValueError as error:
        raise WireError(f"its {name} cannot be read: {error}") from error
    return rows


def mean_distance(replies: Iterable[Reply]) -> float | None:
    """Return the mean of the values `distance` of replies; None if no reply has one."""
    distances = [reply.payload.values["distance"] for reply in replies if "distance" in reply.payload.values]
    return float(np.mean(distances)) if distances else None


def class_counts(reply: Reply, classes: int) -> Array:
    """Return a client's class counts, (classes,) int64; raises WireError if they cannot be of its training examples."""
    arrays = reply.arrays.get("classes", {})
    check(arrays, {"counts": ((classes,), "int64")}, "its class counts")
    counts = arrays["counts"]
    if counts.min(initial=0) < 0:
        raise WireError("its class counts are negative")
    if counts.sum(dtype=float) != reply.examples:
        raise WireError(
            f"its class counts are of {counts.sum(dtype=float):g} examples, and it trains on {reply.examples}"
        )
    return counts


def _zeros(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    whole = np.dtype(dtype).kind != "f"
    return torch.zeros(shape, dtype=torch.float64 if whole or dtype == "float64" else torch.float32)


def _rounded(mean: torch.Tensor, dtype: str) -> Array:
    if np.dtype(dtype).kind != "f":
        mean.round_()
    return mean.numpy().astype(dtype, copy=False)


# ---- clipping


def cut_to_bound(
    models: Mapping[str, Arrays], before: Arrays, bound: float, parts: Mapping[str, Parts] | None = None
) -> tuple[dict[str, Arrays], list[dict[str, Any]]]:
    """Clip updates whose norm is above `bound` times the median; return all models, and a record of each clipping.

    The norm is over all floating arrays of a client, running statistics included, divided by the root of their
    number of entries, so that networks of different sizes can be compared.
    """
    starts = {client: cut(before, (parts or {}).get(client, {})) for client in models}
    norms = {client: _norm(arrays, starts[client]) for client, arrays in models.items()}
    most = bound * median(norms.values())
    clipped, cuts = dict(models), []
    for client, norm in norms.items():
        if norm > most:
            cuts.append({"client": client, "norm": norm, "to": most})
            start = starts[client]
            clipped[client] = {n: _toward(array, start.get(n), most / norm) for n, array in models[client].items()}
    return clipped, cuts


def _toward(array: Array, before: Array | None, share: float) -> Array:
    """Move an array only a share of the way from its start; integers are not changed."""
    if array.dtype.kind != "f":
        return array
    start = 0.0 if before is None else before.astype(np.float64)
    return np.asarray(start + share * (array.astype(np.float64) - start), array.dtype)  # without axes it is a number


def _norm(arrays: Arrays, before: Arrays) -> float:
    squares, entries = 0.0, 0
    for name, array in arrays.items():
        if array.dtype.kind == "f":
            moved = array.astype(np.float64) - before.get(name, 0.0)
            squares, entries = squares + float(np.vdot(moved, moved)), entries + array.size
    return math.sqrt(squares / entries) if entries else 0.0

"""Aggregation of arrays from clients: averages, Byzantine-robust rules, and clipping."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Any, TypeVar, cast

import numpy as np
import torch

from fedhet.flower.insides import aggregate_krum, aggregate_median, aggregate_trimmed_avg
from fedhet.messages import Arrays, Spec
from fedhet.methods.options import Config
from fedhet.server.federation import Federation
from fedhet.server.run import Run
from fedhet.utils.text import log

Array = np.ndarray[Any, Any]
K = TypeVar("K", bound=Hashable)

FURTHEST, FURTHEST_FROM_START = 30.0, 10.0
"""Without `clip-norm`, an update is cut to the median if its norm is above these multiples of the median and of the
norm of the arrays from which the client started: an honest update may be far from the median, but not from these."""


class Aggregator:
    """Averages clients' arrays with the configured aggregation rule, and records which updates were clipped."""

    def __init__(self, run: Run, federation: Federation) -> None:
        self.run, self.federation = run, federation
        self._sent: tuple[Arrays, dict[Hashable, Arrays]] = ({}, {})

    @property
    def plain(self) -> bool:
        """Whether the configured aggregation rule is the mean, without clipping."""
        return self.run.config.aggregation == "mean" and not _bound(self.run.config)

    def average(
        self,
        models: Mapping[str, Arrays],
        weights: Mapping[str, float],
        specs: Mapping[str, Spec] | None = None,
        before: Arrays | None = None,
    ) -> Arrays:
        """Average each shared array over the clients that have it (see `average_shared`), after clipping.

        `before` has the arrays from which clients started, by default the shared model.
        """
        before = self.run.state.model if before is None else before
        models, config = self.clipped(models, dict.fromkeys(models, before)), self.run.config
        specs = self.federation.specs if specs is None else specs
        return average_shared(models, weights, specs, config.aggregation, config.byzantine)

    def average_arrays(self, groups: Mapping[str, Mapping[K, Array]]) -> dict[K, Array]:
        """Average floating-point arrays other than weights, each over the clients that sent it, with equal weights."""
        specs = {c: {name: (array.shape, "float32") for name, array in arrays.items()} for c, arrays in groups.items()}
        averages: Any = self.average(cast(Any, groups), dict.fromkeys(groups, 1.0), cast(Any, specs), before={})
        return cast(dict[K, Array], averages)

    def clipped(
        self,
        groups: Mapping[str, Arrays],
        starts: Mapping[str, Arrays] | None = None,
        scales: Mapping[str, Mapping[str, float]] | None = None,
    ) -> Mapping[str, Arrays]:
        """Return the clients' arrays, with updates clipped to `clip-norm` times the median norm.

        Without `clip-norm`, only updates beyond `FURTHEST` times the median are clipped, with a warning. `starts` are
        the arrays from which each client started, by default zeros. `scales` are factors of arrays in the norms, by
        client, 1 by default.
        """
        bound = _bound(self.run.config)
        if not groups or (not bound and len(groups) < 3):
            return groups
        clipped, cuts = cut_to_bound(groups, starts or {}, bound, scales or {})
        known = {cut["client"] for cut in self.run.round.cuts}
        self.run.round.cuts += [cut for cut in cuts if cut["client"] not in known]
        for cut in () if bound else cuts:
            text = "client %s: its update exceeds %g times the median and %g times the weights: it is cut to the median"
            log.warning(text, cut["client"], FURTHEST, FURTHEST_FROM_START)
        return clipped

    def part_of(self, client: str) -> Arrays:
        """Return the shared arrays that a client has."""
        model, keys = self.run.state.model, tuple(self.federation.specs.get(client, ()))
        # The global model of a method that matches has other shapes than any client's, and the same names.
        whole = self.run.traits.whole
        return self.once(keys, lambda: model if whole else {key: model[key] for key in keys if key in model})

    def once(self, key: Hashable, make: Callable[[], Arrays]) -> Arrays:
        """Return the result of `make`, cached under `key` until the shared model changes."""
        if self._sent[0] is not self.run.state.model:
            self._sent = (self.run.state.model, {})
        sent = self._sent[1]
        if key not in sent:
            sent[key] = make()
        return sent[key]


def _bound(config: Config) -> float:
    return config.clip_norm or (1.0 if config.aggregation == "norm-clipped" else 0.0)


# ---- averages


def average_shared(
    models: Mapping[str, Arrays],
    weights: Mapping[str, float],
    specs: Mapping[str, Spec],
    rule: str = "mean",
    byzantine: float = 0.0,
) -> Arrays:
    """Return the average of each shared array over the clients that sent it, summed in the order of `models`.

    `weights` apply to `rule="mean"`; other rules (`AGGREGATIONS`) weight all clients equally, and tolerate the fraction
    `byzantine` of Byzantine clients.
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
    """Return the weighted mean of groups of arrays with equal names and shapes, in the dtypes of `spec`.

    float64 is summed in float64, other floats in float32, and integers (BatchNorm's counters) in float64.
    """
    total = float(sum(weights))
    average: Arrays = {}
    for name, (shape, dtype) in spec.items():
        single = np.dtype(dtype).kind == "f" and dtype != "float64"
        mean = torch.zeros(shape, dtype=torch.float32 if single else torch.float64)
        for group, weight in zip(groups, weights, strict=True):
            mean.add_(torch.from_numpy(group[name]), alpha=weight / total)
        average[name] = _rounded(mean, dtype)
    return average


def _rounded(mean: torch.Tensor, dtype: str) -> Array:
    if np.dtype(dtype).kind != "f":
        mean.round_()
    return mean.numpy().astype(dtype, copy=False)


# ---- clipping


def cut_to_bound(
    models: Mapping[str, Arrays],
    starts: Mapping[str, Arrays],
    bound: float,
    scales: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> tuple[dict[str, Arrays], list[dict[str, Any]]]:
    """Clip updates (`models` minus `starts`) to `bound` times their median norm; return models and clipping records.

    If `bound` is 0, updates beyond `FURTHEST` times the median norm are clipped to the median norm.

    The norm is taken over all floating-point arrays of a client, running statistics included, and divided by the
    square root of their number of entries, so that networks of different sizes can be compared.
    """
    norms = {client: _norm(arrays, starts.get(client, {}), scales.get(client, {})) for client, arrays in models.items()}
    most = (bound or 1.0) * median(norms.values()) or math.inf  # if most clients did not train
    clipped, cuts = dict(models), []
    for client, norm in norms.items():
        start = starts.get(client, {})
        if norm > most and (bound or norm > max(FURTHEST * most, FURTHEST_FROM_START * _norm(start, {}))):
            cuts.append({"client": client, "norm": norm, "to": most})
            clipped[client] = {n: _toward(array, start.get(n), most / norm) for n, array in models[client].items()}
    return clipped, cuts


def _toward(array: Array, before: Array | None, share: float) -> Array:
    if array.dtype.kind != "f":
        return array
    start = 0.0 if before is None else before.astype(np.float64)
    return np.asarray(start + share * (array.astype(np.float64) - start), array.dtype)  # without axes it is a number


def _norm(arrays: Arrays, before: Arrays, scales: Mapping[str, float] = MappingProxyType({})) -> float:
    squares, entries = 0.0, 0
    for name, array in arrays.items():
        if array.dtype.kind == "f":
            moved = np.subtract(array, before.get(name, 0.0), dtype=np.promote_types(array.dtype, np.float32))
            squares += scales.get(name, 1.0) ** 2 * float(np.vdot(moved, moved))
            entries += array.size
    return math.sqrt(squares / entries) if entries else 0.0


def distances(sent: Mapping[str, Arrays]) -> dict[str, float]:
    """Return, for each client, the sum over its arrays of the distance to the nearest client's array of that name."""
    total = dict.fromkeys(sent, 0.0)
    for client, arrays in sent.items():
        for name, array in arrays.items():
            others = [group[name] for other, group in sent.items() if other != client and name in group]
            total[client] += min((_norm({name: array}, {name: each}) for each in others), default=0.0)
    return total


def robust(clients: list[list[Array]], rule: str, share: float) -> list[Array]:
    """Aggregate the clients' arrays by a rule that tolerates a `share` of Byzantine clients; all have equal weights.

    Rules are `median` and `trimmed-mean` of each entry (Yin et al., ICML 2018), and `krum` and `multi-krum`, which
    select whole clients (Blanchard et al., NeurIPS 2017).
    """
    count, weighted = len(clients), [(arrays, 1) for arrays in clients]
    # At least one if any are expected, but fewer than half, since no rule tolerates more.
    byzantine = min(math.ceil(share * count), (count - 1) // 2)
    if rule == "median":
        return aggregate_median(weighted)
    if rule == "trimmed-mean":
        return aggregate_trimmed_avg(weighted, (byzantine + 0.1) / count)
    return aggregate_krum(weighted, byzantine, 0 if rule == "krum" else count - byzantine)

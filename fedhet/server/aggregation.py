"""Aggregation of arrays from clients: averages, Byzantine-robust rules, and clipping."""

import math
from collections.abc import Callable, Hashable, Mapping
from statistics import median
from typing import Any

import numpy as np
import torch

from fedhet.flower.insides import aggregate_krum, aggregate_median, aggregate_trimmed_avg
from fedhet.messages import Arrays, Reply
from fedhet.server.claims import name_largest, trusted
from fedhet.server.federation import Federation
from fedhet.server.run import Run
from fedhet.utils.text import log

Array = np.ndarray[Any, Any]

FURTHEST, FURTHEST_FROM_START = 30.0, 10.0
"""Limits of the norm of a client's update if `clip-norm` is not set: multiples of the median norm of all clients'
updates, and of the norm of the client's arrays before training. An update above both is scaled to the median norm."""


class Aggregator:
    """Aggregates clients' arrays by the configured rule; clips large updates and records them in `run.round.cuts`."""

    def __init__(self, run: Run, federation: Federation) -> None:
        self.run = run
        self.federation = federation
        self._sent: tuple[Arrays, dict[Hashable, Arrays]] = ({}, {})

    @property
    def plain(self) -> bool:
        """Whether the configured aggregation rule is the mean, without clipping."""
        return trusted(self.run.config)

    def weights(self, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Return the weight of each client in averages: its number of examples, as far as it counts (`limit_claims`).

        All methods take their weights from here. A client with more than half of all weight is named in the log.
        """
        weights = {client: reply.weight for client, reply in replies.items()}
        if self.run.config.aggregation == "mean":
            name_largest(self.run, weights, "training examples")
        return weights

    def average(
        self, models: Mapping[str, Arrays], weights: Mapping[str, float] | None = None, before: Arrays | None = None
    ) -> Arrays:
        """Return the average of each array over the clients that sent it, after clipping updates (see `clipped`).

        `models` has each client's arrays by name, and `weights` each client's weight (by default equal). `before` has
        the arrays from which clients started, by default the shared model.
        """
        config = self.run.config
        before = self.run.state.model if before is None else before
        models = self.clipped(models, dict.fromkeys(models, before))
        return average_shared(models, weights or dict.fromkeys(models, 1.0), config.aggregation, config.byzantine)

    def clipped(
        self,
        groups: Mapping[str, Arrays],
        starts: Mapping[str, Arrays] = {},
        scales: Mapping[str, Mapping[str, float]] = {},
    ) -> Mapping[str, Arrays]:
        """Return the clients' arrays after scaling down updates that are too large.

        `groups` has each client's arrays by name, and `starts` its arrays before training (zeros by default). An update
        is the difference of these arrays, and its norm the root mean square of all floating-point entries, multiplied
        by factors in `scales` (by client and array; 1 by default). Norms are limited to `clip-norm` times the median
        of clients' norms. If no limit is set, a norm is reduced to the median only if it exceeds both `FURTHEST` times
        the median and `FURTHEST_FROM_START` times the norm of the client's arrays in `starts`.
        """
        config = self.run.config
        bound = config.clip_norm or float(config.aggregation == "norm-clipped")
        if not groups or (not bound and len(groups) < 3):
            return groups
        norms = {client: distance(groups[client], starts.get(client, {}), scales.get(client, {})) for client in groups}
        most = (bound or 1.0) * median(norms.values()) or math.inf  # if most clients did not train
        clipped = dict(groups)
        cuts = self.run.round.cuts
        for client, norm in norms.items():
            start = starts.get(client, {})
            if norm <= most or (not bound and norm <= max(FURTHEST * most, FURTHEST_FROM_START * distance(start, {}))):
                continue
            if not bound:
                text = "client %s: its update is over %g times the median one and %g times its weights: it is reduced"
                log.warning(text, client, FURTHEST, FURTHEST_FROM_START)
            if not any(cut["client"] == client for cut in cuts):
                cuts.append({"client": client, "norm": norm, "to": most})
            clipped[client] = {n: _toward(array, start.get(n), most / norm) for n, array in groups[client].items()}
        return clipped

    def part_of(self, client: str) -> Arrays:
        """Return the arrays of the shared model that a client's network has."""
        model = self.run.state.model
        keys = tuple(self.federation.specs.get(client, ()))
        # The global model of a method that matches has other shapes than any client's, and the same names.
        whole = self.run.traits.whole
        return self.once(keys, lambda: model if whole else {key: model[key] for key in keys if key in model})

    def once(self, key: Hashable, make: Callable[[], Arrays]) -> Arrays:
        """Return `make()`, cached under `key` until the shared model changes."""
        if self._sent[0] is not self.run.state.model:
            self._sent = (self.run.state.model, {})
        if key not in self._sent[1]:
            self._sent[1][key] = make()
        return self._sent[1][key]


def average_shared(
    models: Mapping[str, Arrays], weights: Mapping[str, float], rule: str = "mean", byzantine: float = 0.0
) -> Arrays:
    """Return the average of each array over the clients that sent it; averages of integers are rounded.

    `models` has each client's arrays by name; the order of clients is the order of summation. `weights` has each
    client's weight for the rule `mean`. The other rules, such as `krum`, weight all clients equally; robust rules
    tolerate a fraction `byzantine` of Byzantine clients.
    """
    owners: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(name for model in models.values() for name in model):
        owners.setdefault(tuple(client for client in models if name in models[client]), []).append(name)
    averages: Arrays = {}
    for having, names in owners.items():
        groups = [models[client] for client in having]
        if rule in ("mean", "norm-clipped"):
            counts = [weights[client] if rule == "mean" else 1.0 for client in having]
            total = sum(counts)
            means = [_mean([group[name] for group in groups], [count / total for count in counts]) for name in names]
        else:
            means = robust([[group[name].astype(np.float64) for name in names] for group in groups], rule, byzantine)
        for name, mean in zip(names, means, strict=True):
            dtype = groups[0][name].dtype
            averages[name] = np.asarray(mean if dtype.kind == "f" else np.rint(mean), dtype)
    return averages


def _mean(arrays: list[Array], fractions: list[float]) -> Array:
    single = arrays[0].dtype.kind == "f" and arrays[0].dtype != np.float64
    mean = torch.zeros(arrays[0].shape, dtype=torch.float32 if single else torch.float64)
    for array, fraction in zip(arrays, fractions, strict=True):
        mean.add_(torch.from_numpy(array), alpha=fraction)
    return mean.numpy()


def _toward(array: Array, before: Array | None, fraction: float) -> Array:
    if array.dtype.kind != "f":
        return array
    start = 0.0 if before is None else before.astype(np.float64)
    return np.asarray(start + fraction * (array.astype(np.float64) - start), array.dtype)  # without axes it is a number


def distance(arrays: Arrays, before: Arrays, scales: Mapping[str, float] = {}) -> float:
    """Return the root mean square of the floating-point entries of `arrays` - `before`, each times its `scales`."""
    squares, entries = 0.0, 0
    for name, array in arrays.items():
        if array.dtype.kind == "f":
            moved = np.subtract(array, before.get(name, 0.0), dtype=np.promote_types(array.dtype, np.float32))
            squares += scales.get(name, 1.0) ** 2 * float(np.vdot(moved, moved))
            entries += array.size
    return math.sqrt(squares / entries) if entries else 0.0


def robust(clients: list[list[Array]], rule: str, fraction: float) -> list[Array]:
    """Return the aggregate of the clients' arrays, by a rule that tolerates a `fraction` of Byzantine clients.

    `clients` has each client's arrays, in the same order. The rules `median` and `trimmed-mean` (Yin et al., ICML 2018)
    aggregate each entry of the arrays; `krum` and `multi-krum` (Blanchard et al., NeurIPS 2017) select clients.
    """
    count = len(clients)
    weighted = [(arrays, 1) for arrays in clients]
    # At least one if any are expected, but fewer than half, since no rule tolerates more.
    byzantine = min(math.ceil(fraction * count), (count - 1) // 2)
    if rule == "median":
        return aggregate_median(weighted)
    if rule == "trimmed-mean":
        return aggregate_trimmed_avg(weighted, (byzantine + 0.1) / count)
    return aggregate_krum(weighted, byzantine, 0 if rule == "krum" else count - byzantine)

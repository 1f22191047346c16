"""Statistics over clients: metrics that can be combined, results of a client in a round, and means and spreads."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

Statistics = dict[str, float | None]
STATISTICS = ("weighted", "mean", "std", "min", "max")


@dataclass(frozen=True)
class Metric:
    """A client's metric, with weights; `total` combines the metrics of several clients.

    `values` has a number for each label, target or class, or one for accuracy. A weight is the number of predictions
    (accuracy, R2), of pairs of a positive and a negative example (AUC of a multi-label task) or of pixels in the union
    (IoU), and 0 if the value is undefined. `behind` has the number of examples behind each value, if it is smaller than
    the number of all examples; it is not sent.
    """

    values: tuple[float, ...]
    weights: tuple[float, ...]
    behind: tuple[int, ...] = field(default=(), compare=False)

    @property
    def value(self) -> float:
        """The unweighted mean of `values`; those with weight 0 are left out. nan if none is left."""
        defined = [value for value, weight in zip(self.values, self.weights, strict=True) if weight > 0]
        return math.fsum(defined) / len(defined) if defined else math.nan

    @staticmethod
    def total(metrics: Iterable["Metric"]) -> "Metric":
        """Return the weighted mean and total weight of each entry; raises a `ValueError` if lengths differ."""
        values, weights = [], []
        pairs = (zip(metric.values, metric.weights, strict=True) for metric in metrics)
        for label in map(list, zip(*pairs, strict=True)):
            weights.append(math.fsum(weight for _, weight in label))
            # A value with weight 0 is nan, and nan * 0 is not 0.
            won = math.fsum(value * weight for value, weight in label if weight > 0)
            values.append(won / weights[-1] if weights[-1] else math.nan)
        return Metric(tuple(values), tuple(weights))


def over_same_clients(evaluations: Sequence[Mapping[str, Metric]], worst: float) -> list[dict[str, Metric]]:
    """Return each evaluation (metrics by client) over the clients of all of them.

    A client that an evaluation lacks has there the value `worst`, so that no evaluation is better for lacking clients.
    """
    clients = {client: metric for metrics in evaluations for client, metric in metrics.items()}
    lost = {client: replace(metric, values=(worst,) * len(metric.values)) for client, metric in clients.items()}
    return [lost | dict(metrics) for metrics in evaluations]


@dataclass(frozen=True)
class ClientRow:
    """A row of `clients.csv`: the results of a client in a round.

    `examples` counts the training examples, and bytes are sent (up) and received (down) by the client. `accuracy` is
    the task's metric, whose name heads the column of the file. It and the loss are None without an evaluation, epsilon
    without differentially private training.
    """

    round: int
    client: str
    architecture: str
    examples: int
    accuracy: float | None
    loss: float | None
    bytes_up: int
    bytes_down: int
    epsilon: float | None = None


@dataclass(frozen=True)
class Work:
    """The cost of training: gradient steps on a client's own examples, all gradient steps, and forward passes.

    Evaluation is not counted, nor is training that is undone after an evaluation.
    """

    private_steps: int = 0
    steps: int = 0
    forwards: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))


def never_took_part(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return, by client, the last error of clients that never trained; `rows` are the lines of `history.jsonl`."""
    rows = list(rows)
    took_part = {client for row in rows for client in row["participants"]}
    failures = [failure for row in rows for failure in row["failures"] if failure.get("client") not in took_part]
    return {str(failure.get("client")): str(failure.get("reason")) for failure in failures}


def summarise(values: Mapping[str, tuple[Metric, float, float]], metric: str = "accuracy") -> dict[str, Any] | None:
    """Return statistics (see `STATISTICS`) over clients, given each client's metric, loss and weight of the loss.

    The result is `{metric: {statistic: value}, "loss": ..., "clients": n}`, or None if no client has examples, for
    which the weight is 0. Metrics are weighted by their own weights. Undefined metrics (NaN, such as the AUC of a
    single class) are left out. If a loss is not finite, the statistics of the loss are None.
    """
    evaluated = [value for value in values.values() if value[2] > 0]
    if not evaluated:
        return None
    metrics = [value for value, _, _ in evaluated if not math.isnan(value.value)]
    losses = [(loss, weight) for _, loss, weight in evaluated]
    scores = _statistics([value.value for value in metrics], Metric.total(metrics).value)
    loss = _statistics([loss for loss, _ in losses], weighted_mean(losses))
    return {metric: scores, "loss": loss, "clients": len(evaluated)}


def metric_in(evaluated: Mapping[str, Any] | None) -> Any:
    """Return the first entry of an evaluation in a row, which has the task's metric by its name; None without one."""
    return next(iter(evaluated.values()), None) if evaluated else None


def weighted_mean(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the weighted mean of values in pairs (value, weight)."""
    return math.fsum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


def _statistics(values: Sequence[float], weighted: float) -> Statistics:
    if not values or not all(math.isfinite(value) for value in values):
        return dict.fromkeys(STATISTICS)
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return dict(zip(STATISTICS, (weighted, mean, std, min(values), max(values)), strict=True))


def as_statistics(value: Mapping[str, Any] | float | None) -> Mapping[str, Any]:
    """Return statistics over clients, also for one value that counts for every client; {} for None.

    The server's evaluation of the global model has one value.
    """
    if value is None or isinstance(value, Mapping):
        return value or {}
    return _statistics([value], value)


K = TypeVar("K")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Group the values of (key, value) pairs by key; keys and values keep their order."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def client_order(client: str) -> tuple[bool, int, str]:
    """Return a key for sorting names of clients: numbers first, by value, then other names alphabetically."""
    return (False, int(client), client) if client.isdecimal() else (True, 0, client)


def in_order(clients: Iterable[str]) -> list[str]:
    """Return the names of clients in order: numbers first, by value, then other names alphabetically."""
    return sorted(clients, key=client_order)

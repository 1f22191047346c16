"""Flower's robust aggregation rules."""

import math
from typing import Any

import numpy as np
from flwr.server.strategy.aggregate import aggregate_krum, aggregate_median, aggregate_trimmed_avg

Array = np.ndarray[Any, Any]


def robust(clients: list[list[Array]], rule: str, share: float) -> list[Array]:
    """Aggregate the clients' lists of arrays, position by position; every client has the same weight.

    Args:
        clients: each client's arrays, of equal shapes.
        rule: `median` or `trimmed-mean` of each entry (Yin et al., ICML 2018); `krum` or `multi-krum`, which select
            whole clients (Blanchard et al., NeurIPS 2017).
        share: fraction of Byzantine clients to tolerate; the median ignores it.
    """
    count, weighted = len(clients), [(arrays, 1) for arrays in clients]
    # At least one if any are expected, but fewer than half, since no rule tolerates more.
    byzantine = min(math.ceil(share * count), (count - 1) // 2)
    if rule == "median":
        return aggregate_median(weighted)
    if rule == "trimmed-mean":
        return aggregate_trimmed_avg(weighted, (byzantine + 0.1) / count)
    return aggregate_krum(weighted, byzantine, 0 if rule == "krum" else count - byzantine)

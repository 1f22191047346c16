"""Flower's aggregation rules, which some Byzantine clients cannot carry away."""

import math
from typing import Any

import numpy as np
from flwr.server.strategy.aggregate import aggregate_krum, aggregate_median, aggregate_trimmed_avg

Array = np.ndarray[Any, Any]


def robust(clients: list[list[Array]], rule: str, share: float) -> list[Array]:
    """Return one array for each position of the clients' equal lists of arrays; every client counts the same.

    Args:
        clients: at least one. Of fewer than three the median is the mean of both, and Krum takes the first.
        rule: `median` or `trimmed-mean` of each entry (Yin et al., ICML 2018); `krum` or `multi-krum`, which take whole
            clients (Blanchard et al., NeurIPS 2017).
        share: of the clients may be Byzantine; the median needs no such number.
    """
    count, weighted = len(clients), [(arrays, 1) for arrays in clients]
    # Fewer than half of all, or no rule helps; at least one where any are expected.
    byzantine = min(math.ceil(share * count), (count - 1) // 2)
    if rule == "median":
        return aggregate_median(weighted)
    if rule == "trimmed-mean":
        return aggregate_trimmed_avg(weighted, (byzantine + 0.1) / count)
    return aggregate_krum(weighted, byzantine, 0 if rule == "krum" else count - byzantine)

"""Each client's gain of a method over training alone, which is the same client and seed under `local`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedhet.predictions import GLOBAL, Predictions

NOISE = 2.0
"""Standard errors below `local` from which a client counts as worse off; by chance 2 % of clients do."""

WORST = 0.1
"""The worst tenth, as a share of the clients."""


@dataclass(frozen=True)
class Gain:
    """A client's gain in accuracy over training alone, and its standard error under no gain.

    The error is that of the difference of two proportions on the same test examples (McNemar, Psychometrika 12, 1947),
    from the examples that only one of both predicts right.
    """

    value: float
    error: float

    @property
    def worse_off(self) -> bool:
        """Whether the client is below training alone by more than the noise of its test part."""
        return self.value < -NOISE * self.error


def gains(method: Mapping[str, Predictions], local: Mapping[str, Predictions]) -> dict[str, Gain]:
    """Return the gains of the clients that both runs tested on the same examples."""
    by_client = {}
    for client, alone in local.items():
        predictions = method.get(client) or method.get(GLOBAL)
        if predictions is not None and len(alone.right) and np.array_equal(predictions.examples, alone.examples):
            difference = predictions.right.astype(float) - alone.right
            error = math.sqrt(np.square(difference).sum()) / len(difference)
            by_client[client] = Gain(float(difference.mean()), error)
    return by_client


def worse_off(gains: Mapping[str, Gain]) -> float | None:
    """Return the share of clients that are worse off than alone; None without clients."""
    return sum(gain.worse_off for gain in gains.values()) / len(gains) if gains else None


def worst_tenth(gains: Mapping[str, Gain]) -> float | None:
    """Return the mean gain of the tenth of the clients that gain least (at least one); None without clients."""
    values = sorted(gain.value for gain in gains.values())[: math.ceil(WORST * len(gains))]
    return sum(values) / len(values) if values else None

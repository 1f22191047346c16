"""Controls of FedMA and PFNM: units are averaged without matching.

Each is a method that takes FedMA's or PFNM's keys, named on the command line by file and name; no key of
matching counts:

    fedhet run run_configs/fedma/digits.toml --set method=run_configs/fedma/controls.py:identity
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedhet.algorithms.matching import LayerMatch, Matching
from fedhet.strategies.fedma import FedMA
from fedhet.strategies.pfnm import PFNM

Array = np.ndarray[Any, Any]


class Identity(Matching):
    """Average units by their position, with equal weights."""

    def match(self, matrices: Sequence[Array], group: Any, prior: Any, random: np.random.RandomState) -> LayerMatch:
        """Return as many global rows as the widest client has, each the mean of the clients' rows at its place."""
        size = max(map(len, matrices))
        assignments = [self.places(len(rows), size, random) for rows in matrices]
        total, counts = np.zeros((size, matrices[0].shape[1])), np.bincount(np.concatenate(assignments), minlength=size)
        for rows, assignment in zip(matrices, assignments, strict=True):
            total[assignment] += rows
        return LayerMatch(assignments, total / counts[:, None], counts)

    def places(self, rows: int, size: int, random: np.random.RandomState) -> Array:
        """Return a different global row for each of a client's rows."""
        return np.arange(rows)


class Random(Identity):
    """Average units at random positions."""

    def places(self, rows: int, size: int, random: np.random.RandomState) -> Array:
        """Draw them from the seed, client by client."""
        places: Array = random.permutation(size)[:rows]
        return places


class FedMAIdentity(FedMA):
    """FedMA's schedule without matching."""

    def matching(self) -> Matching:
        """Return the rule that takes the place of matching."""
        return Identity(average="mean")


class FedMARandom(FedMA):
    """FedMA's schedule without matching."""

    def matching(self) -> Matching:
        """Return the rule that takes the place of matching."""
        return Random(average="mean")


class PFNMIdentity(PFNM):
    """PFNM's single round without matching."""

    def matching(self) -> Matching:
        """Return the rule that takes the place of matching."""
        return Identity(average="mean")


identity = FedMA.method.variant("fedma-identity", server=FedMAIdentity)
random = FedMA.method.variant("fedma-random", server=FedMARandom)
pfnm_identity = PFNM.method.variant("pfnm-identity", server=PFNMIdentity)

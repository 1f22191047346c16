"""Nearest neighbour, client side: the class of the nearest of its own examples."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhet.methods.nearest_neighbour import NearestNeighbourParameters

from ._classical import Classical  # noqa: TID251 - this folder is fedhet.client_apps


class NearestNeighbour(Classical[NearestNeighbourParameters]):
    """The class of the nearest of the client's own examples, by Euclidean distance of inputs."""

    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        """Cover and Hart (1967)."""
        from sklearn.neighbors import KNeighborsClassifier

        return KNeighborsClassifier(min(self.parameters.neighbours, len(labels))).fit(features, labels)

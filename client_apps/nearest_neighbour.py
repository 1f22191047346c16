"""Client side that predicts the class of the client's nearest example (Cover and Hart, 1967)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .families.classifiers import Classifier


class NearestNeighbour(Classifier):
    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        from sklearn.neighbors import KNeighborsClassifier

        return KNeighborsClassifier(1).fit(features, labels)

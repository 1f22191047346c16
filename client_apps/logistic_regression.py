"""Client side that fits a linear classifier with an L2 penalty, or a constant if there is only one class."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhet.models.estimators import fitted

from .families.classifiers import Classifier


class LogisticRegression(Classifier):
    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        from sklearn.linear_model import LogisticRegression

        return fitted(LogisticRegression(max_iter=1000), features, labels)

"""Logistic regression, client side: a linear classifier of inputs."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhet.methods.logistic_regression import LogisticRegressionParameters

from ._classical import Classical  # noqa: TID251 - this folder is fedhet.client_apps


class LogisticRegression(Classical[LogisticRegressionParameters]):
    """A linear classifier of inputs, with an L2 penalty."""

    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        """Fit it; a client of one class says that class."""
        from sklearn.dummy import DummyClassifier
        from sklearn.linear_model import LogisticRegression

        if len(np.unique(labels)) == 1:
            return DummyClassifier().fit(features, labels)
        return LogisticRegression(C=self.parameters.c, max_iter=1000).fit(features, labels)

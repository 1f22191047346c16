"""Logistic regression, server side: nothing is shared; the clients are only counted and evaluated."""

from fedhet.methods import logistic_regression
from fedhet.server import FederatedStrategy, State


class LogisticRegression(FederatedStrategy[logistic_regression.LogisticRegressionParameters, State]):
    """A linear classifier of inputs: a control without networks or peers."""

    method = logistic_regression.method

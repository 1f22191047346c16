"""Logistic regression: each client fits a linear classifier with an L2 penalty to its own examples."""

from .families.classifiers import Classifiers, classifier


@classifier("logistic-regression", "fedhet.client_apps.logistic_regression:LogisticRegression")
class LogisticRegression(Classifiers):
    """Logistic regression: a client fits a linear classifier to its examples."""

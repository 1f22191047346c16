"""Logistic regression: each client fits a linear classifier with an L2 penalty to its own examples."""

from fedhet.methods.method import method

from .families.classifiers import ONE_ROUND, TRAITS, Classifiers, Keys


@method(
    "logistic-regression",
    TRAITS,
    Keys,
    client="fedhet.client_apps.logistic_regression:LogisticRegression",
    common=ONE_ROUND,
    own=ONE_ROUND,
)
class LogisticRegression(Classifiers):
    """Logistic regression: a client fits a linear classifier to its examples."""

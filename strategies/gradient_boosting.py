"""Gradient boosting (Friedman, 2001): each client fits boosted trees with histograms to its own examples."""

from fedhet.methods.method import method

from .families.classifiers import ONE_ROUND, TRAITS, Classifiers, Keys


@method(
    "gradient-boosting",
    TRAITS,
    Keys,
    client="fedhet.client_apps.gradient_boosting:GradientBoosting",
    common=ONE_ROUND,
    own=ONE_ROUND,
)
class GradientBoosting(Classifiers):
    """Gradient boosting: a client fits boosted trees with histograms to its examples."""

"""Gradient boosting (Friedman, 2001): each client fits boosted trees with histograms to its own examples."""

from .families.classifiers import Classifiers, classifier


@classifier("gradient-boosting", "fedhet.client_apps.gradient_boosting:GradientBoosting")
class GradientBoosting(Classifiers):
    """Gradient boosting: a client fits boosted trees with histograms to its examples."""

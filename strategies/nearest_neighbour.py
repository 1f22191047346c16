"""Nearest neighbour (Cover and Hart, 1967): a client predicts the class of its nearest training example."""

from .families.classifiers import Classifiers, classifier


@classifier("nearest-neighbour", "fedhet.client_apps.nearest_neighbour:NearestNeighbour")
class NearestNeighbour(Classifiers):
    """Nearest neighbour: a client predicts the class of its nearest example (Cover and Hart, 1967)."""

"""Nearest neighbour (Cover and Hart, 1967): a client predicts the class of its nearest training example."""

from fedhet.methods.method import method

from .families.classifiers import ONE_ROUND, TRAITS, Classifiers, Keys


@method(
    "nearest-neighbour",
    TRAITS,
    Keys,
    client="fedhet.client_apps.nearest_neighbour:NearestNeighbour",
    common=ONE_ROUND,
    own=ONE_ROUND,
)
class NearestNeighbour(Classifiers):
    """Nearest neighbour: a client predicts the class of its nearest example (Cover and Hart, 1967)."""

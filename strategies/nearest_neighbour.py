"""Nearest neighbour, server side: nothing is shared; the clients are only counted and evaluated."""

from fedhet.methods import nearest_neighbour
from fedhet.server import FederatedStrategy, State


class NearestNeighbour(FederatedStrategy[nearest_neighbour.NearestNeighbourParameters, State]):
    """The class of the nearest of its own examples: a control without networks or peers."""

    method = nearest_neighbour.method

"""Nearest neighbour on a client's own examples: a control without networks or peers."""

from dataclasses import dataclass

from fedhet.method import Method, Traits
from fedhet.methods._classical import ClassicalParameters
from fedhet.options import option


@dataclass(frozen=True)
class NearestNeighbourParameters(ClassicalParameters):
    """Its key."""

    neighbours: int = option(1, "own examples that vote", at_least=1)


method = Method(
    "nearest-neighbour",
    traits=Traits(keeps="model", scored="trained", public="none", alone=True),
    Parameters=NearestNeighbourParameters,
    server="fedhet.strategies.nearest_neighbour:NearestNeighbour",
    client="fedhet.client_apps.nearest_neighbour:NearestNeighbour",
    common={"rounds": 1},
)

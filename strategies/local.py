"""Local training, server half: nothing is shared and nothing is learnt; the clients are only counted and evaluated."""

from dataclasses import dataclass

from fedhet.server import FederatedStrategy


@dataclass(frozen=True)
class Parameters:
    """Local training has none of its own."""


class Local(FederatedStrategy):
    """What every client achieves alone: the line to beat."""

    name = "local"
    Parameters = Parameters

"""Local training, server side: nothing is shared and nothing is learnt; the clients are only counted and evaluated."""

from fedhet.methods.included import local
from fedhet.server import FederatedStrategy, State


class Local(FederatedStrategy[local.LocalParameters, State]):
    """Every client trains alone: the line to beat."""

    method = local.method

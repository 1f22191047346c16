"""Local training, server side: clients share nothing and are only evaluated."""

from fedhet.methods.included import local
from fedhet.server import FederatedStrategy, State


class Local(FederatedStrategy[local.LocalParameters, State]):
    """Every client trains without the others: the baseline of every comparison."""

    method = local.method

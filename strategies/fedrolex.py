"""FedRolex, server side: windows that roll over each hidden layer's units (Alam et al., NeurIPS 2022, equation 2).

Of K units a client of width r has in round t those from (t - 1) mod K on, ceil(r K) of them, past the last one again
from the first: `fedhet.methods.sharing.ROLLING_UNITS`. The client side is HeteroFL's, and so is all else.
"""

from fedhet.methods.included import fedrolex

from .heterofl import HeteroFL  # noqa: TID251 - this folder is fedhet.strategies


class FedRolex(HeteroFL):
    """Averages as HeteroFL does; what differs is which units a client has (`Sharing.units`)."""

    method = fedrolex.method

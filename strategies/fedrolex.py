"""FedRolex, server side: windows that roll over each hidden layer's units (Alam et al., NeurIPS 2022, equation 2).

Of the K units of a layer, a client of width r has in round t the ceil(r K) units that start at (t - 1) mod K and wrap
around (`fedhet.methods.sharing.ROLLING_UNITS`). Everything else is the same as in HeteroFL.
"""

from fedhet.methods.included import fedrolex

from .heterofl import HeteroFL  # noqa: TID251 - this folder is fedhet.strategies


class FedRolex(HeteroFL):
    """Averages like HeteroFL; only the units that clients have differ, and roll from round to round."""

    method = fedrolex.method

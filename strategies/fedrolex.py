"""FedRolex, server side: windows that roll over each hidden layer's units (Alam et al., NeurIPS 2022, equation 2).

Of K units, a client of width r has in round t the ceil(r K) units from (t - 1) mod K on, modulo K
(`fedhet.methods.sharing.ROLLING_UNITS`). Everything else is HeteroFL's.
"""

from fedhet.methods.included import fedrolex

from .heterofl import HeteroFL  # noqa: TID251 - this folder is fedhet.strategies


class FedRolex(HeteroFL):
    """Averages like HeteroFL; clients have other units (`Sharing.units`)."""

    method = fedrolex.method

"""Label spreading, server side: nothing is shared; the clients are only counted and evaluated."""

from fedhet.methods import label_spreading
from fedhet.server import FederatedStrategy, State


class LabelSpreading(FederatedStrategy[label_spreading.LabelSpreadingParameters, State]):
    """Its labels, spread over the public inputs: a control without networks or peers."""

    method = label_spreading.method

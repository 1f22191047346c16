"""The methods of scikit-learn, server side: nothing is shared; the clients are only counted and evaluated."""

from fedhet.methods.included import label_spreading, logistic_regression, nearest_neighbour
from fedhet.methods.included._classical import ClassicalParameters
from fedhet.server import FederatedStrategy, State


class NearestNeighbour(FederatedStrategy[ClassicalParameters, State]):
    """The class of the nearest of a client's own examples."""

    method = nearest_neighbour.method


class LogisticRegression(FederatedStrategy[ClassicalParameters, State]):
    """A linear classifier of a client's own inputs."""

    method = logistic_regression.method


class LabelSpreading(FederatedStrategy[ClassicalParameters, State]):
    """A client's own labels, spread over the public inputs."""

    method = label_spreading.method

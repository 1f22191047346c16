"""The methods of scikit-learn, server side: clients share nothing and are only evaluated."""

from fedhet.methods.included import label_spreading, logistic_regression, nearest_neighbour
from fedhet.methods.included._classical import ClassicalParameters
from fedhet.server import FederatedStrategy, State


class NearestNeighbour(FederatedStrategy[ClassicalParameters, State]):
    """Predicts the class of the nearest of a client's own examples."""

    method = nearest_neighbour.method


class LogisticRegression(FederatedStrategy[ClassicalParameters, State]):
    """Trains a linear classifier on a client's own inputs."""

    method = logistic_regression.method


class LabelSpreading(FederatedStrategy[ClassicalParameters, State]):
    """Spreads a client's own labels over the public inputs."""

    method = label_spreading.method

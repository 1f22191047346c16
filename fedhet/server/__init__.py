"""The server's side of a run: the contract of a server half, and the strategy that every method is."""

from fedhet.server.aggregation import RunningMean, average_shared, check_class_counts, class_means, weighted_average
from fedhet.server.half import ServerHalf
from fedhet.server.robust import Rule
from fedhet.server.strategy import EvaluateFunction, FederatedStrategy
from fedhet.state import ArraysBy, ClientRecord, State

__all__ = [
    "ArraysBy",
    "ClientRecord",
    "EvaluateFunction",
    "FederatedStrategy",
    "Rule",
    "RunningMean",
    "ServerHalf",
    "State",
    "average_shared",
    "check_class_counts",
    "class_means",
    "weighted_average",
]

"""The server's side of a run: the strategy that every method is, and its hooks."""

from fedhet.rows import in_order
from fedhet.server.aggregation import RunningMean, average_shared, check_class_counts, class_means, weighted_average
from fedhet.server.hooks import Hooks
from fedhet.server.strategy import EvaluateFunction, FederatedStrategy
from fedhet.state import ArraysBy, ClientRecord, State

__all__ = [
    "ArraysBy",
    "ClientRecord",
    "EvaluateFunction",
    "FederatedStrategy",
    "Hooks",
    "RunningMean",
    "State",
    "average_shared",
    "check_class_counts",
    "class_means",
    "in_order",
    "weighted_average",
]

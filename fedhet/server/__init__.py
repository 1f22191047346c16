"""The server side of a run: `FederatedStrategy`, the base class of all strategies, and names that strategies import."""

from fedhet.messages import Arrays, Payload, Reply, WireError
from fedhet.methods.method import METRICS, STRUCTURE, Traits, method
from fedhet.methods.options import Config, Options, option
from fedhet.results.state import ArraysBy, ClientRecord, State
from fedhet.server.aggregation import average_shared
from fedhet.server.handshake import Common
from fedhet.server.loop import EvaluateFunction
from fedhet.server.strategy import FederatedStrategy
from fedhet.utils.statistics import in_order

__all__ = ["METRICS", "STRUCTURE", "Arrays", "ArraysBy", "ClientRecord", "Common", "Config", "EvaluateFunction"]
__all__ += ["FederatedStrategy", "Options", "Payload", "Reply", "State", "Traits", "WireError", "average_shared"]
__all__ += ["in_order", "method", "option"]

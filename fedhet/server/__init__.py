"""The server side of a run: `FederatedStrategy`, the base class of all strategies, and names that strategies import."""

from fedhet.results.state import ArraysBy as ArraysBy
from fedhet.results.state import ClientRecord as ClientRecord
from fedhet.results.state import State as State
from fedhet.server.aggregation import average_shared as average_shared
from fedhet.server.handshake import Common as Common
from fedhet.server.loop import EvaluateFunction as EvaluateFunction
from fedhet.server.strategy import FederatedStrategy as FederatedStrategy
from fedhet.utils.statistics import in_order as in_order

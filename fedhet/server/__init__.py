"""The server's side of a run: the strategy that every method is, and its hooks."""

from fedhet.rows import in_order as in_order
from fedhet.server.aggregation import RunningMean as RunningMean
from fedhet.server.aggregation import average_shared as average_shared
from fedhet.server.aggregation import class_counts as class_counts
from fedhet.server.aggregation import class_means as class_means
from fedhet.server.aggregation import mean_distance as mean_distance
from fedhet.server.aggregation import packed_rows as packed_rows
from fedhet.server.aggregation import weighted_average as weighted_average
from fedhet.server.hooks import Hooks as Hooks
from fedhet.server.roster import Common as Common
from fedhet.server.roster import public_rows as public_rows
from fedhet.server.roster import tokens_of as tokens_of
from fedhet.server.strategy import EvaluateFunction as EvaluateFunction
from fedhet.server.strategy import FederatedStrategy as FederatedStrategy
from fedhet.state import ArraysBy as ArraysBy
from fedhet.state import ClientRecord as ClientRecord
from fedhet.state import State as State

"""The server side: takes replies in one by one."""

from dataclasses import dataclass, field

import numpy as np

from fedhet.messages import Arrays
from fedhet.server import FederatedStrategy, RunningMean, State

from . import SlowOptions, slow


@dataclass
class SlowState(State):
    """The change of the last round, and the number of rounds in which anything changed."""

    change: Arrays = field(default_factory=dict)
    changes: int = 0


class Slow(FederatedStrategy[SlowOptions, SlowState]):
    """W(t) = inertia W(t-1) + (1 - inertia) mean."""

    method = slow
    state_class = SlowState
    streams_replies = True

    def configure_fit(self, round, clients):
        self.mean = RunningMean()
        return super().configure_fit(round, clients)

    def consume_reply(self, round, reply):
        self.mean.add(reply.arrays.pop("model"), float(reply.examples), self.federation.specs[reply.client])

    def aggregate_fit(self, round, replies):
        before, inertia = self.state.model, np.float32(self.options.inertia)
        self.state.model = {
            name: inertia * before[name] + (1 - inertia) * array for name, array in self.mean.mean().items()
        }
        self.state.change = {name: array - before[name] for name, array in self.state.model.items()}
        self.state.changes += 1
        return {}

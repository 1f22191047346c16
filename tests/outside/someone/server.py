"""The server side, with a state of its own."""

from dataclasses import dataclass, field

import numpy as np

from fedhet.messages import Arrays
from fedhet.server import FederatedStrategy, State

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

    def aggregate_fit(self, round, replies):
        before, inertia = self.state.model, np.float32(self.options.inertia)
        super().aggregate_fit(round, replies)
        mean = self.state.model
        self.state.model = {name: inertia * before[name] + (1 - inertia) * array for name, array in mean.items()}
        self.state.change = {name: array - before[name] for name, array in self.state.model.items()}
        self.state.changes += 1
        return {}

"""DepthFL, server side: each array is averaged over the clients that have it (Kim et al., ICLR 2023).

    W(t)[a] = sum_{i: a in A_i} n_i W_i(t)[a] / sum_{i: a in A_i} n_i

where client i has the arrays A_i of its first d_i blocks and of their exits. The global model's scores are the mean of
all exits'.
"""

from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from fedhet.graphs.exits import Exits
from fedhet.matching import understand
from fedhet.methods import depthfl
from fedhet.rows import in_order
from fedhet.server import FederatedStrategy, State
from fedhet.wire import Reply, load_into


@dataclass
class DepthState(State):
    """`blocks` is the whole network by blocks, as clients describe it."""

    blocks: str = ""


D = TypeVar("D", bound=depthfl.DepthParameters)
T = TypeVar("T", bound=DepthState)


class ByDepth(FederatedStrategy[D, T]):
    """Averages like FedAvg, each array over the clients that have it."""

    def admit(self, reply: Reply) -> None:
        """Keep the description of the network, which is the same for all clients."""
        self.state.blocks = self.state.blocks or reply.report.groups

    def with_exits(self) -> Exits | None:
        """Return the whole network with its exits; None if there is none, or if statistics stay with clients."""
        if not self.has_global_model:
            return None
        groups = understand(self.state.blocks)
        model = Exits(self.networks.like(in_order(self.state.clients)[0]), groups[0].width)
        model.add_exits(groups)
        if model.state_dict().keys() - self.state.model.keys():
            return None
        load_into(model.state_dict(), self.state.model)
        return model


class DepthFL(ByDepth[depthfl.DepthFLParameters, DepthState]):
    """Averages by depth; the global model is the network with its exits."""

    method = depthfl.method
    state_class = DepthState

    def global_model(self) -> nn.Module | None:
        """Return the whole network with its exits; None if there is none, or if statistics stay with clients."""
        return self.with_exits()

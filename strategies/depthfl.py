"""DepthFL, server side: each array is averaged over the clients that have it (Kim et al., ICLR 2023).

    W(t)[a] = sum_{i: a in A_i} n_i W_i(t)[a] / sum_{i: a in A_i} n_i

where client i has the arrays A_i of its first d_i blocks and of the exits of these blocks (classifiers). The global
model's scores are the mean of the scores of all exits.
"""

from typing import TypeVar

from torch import nn

from fedhet.algorithms.graphs.blocks import Exits
from fedhet.messages import load_into
from fedhet.methods.included.submodels import DepthFLOptions, DepthOptions, depthfl
from fedhet.server.submodel import SubmodelState, SubmodelStrategy, read_network
from fedhet.utils.statistics import in_order

D = TypeVar("D", bound=DepthOptions)
T = TypeVar("T", bound=SubmodelState)


class ByDepth(SubmodelStrategy[D, T]):
    """Averages like FedAvg, but each array over the clients whose network is deep enough to have it."""

    def with_exits(self) -> Exits | None:
        """Return the whole network with its exits; None if none is trained or clients keep BatchNorm's statistics."""
        if not self.has_global_model:
            return None
        groups = read_network(self.state.network)
        model = Exits(self.networks.like(in_order(self.state.clients)[0]), groups[0].width)
        model.add_exits(groups)
        if model.state_dict().keys() - self.state.model.keys():
            return None
        load_into(model.state_dict(), self.state.model)
        return model


class DepthFL(ByDepth[DepthFLOptions, SubmodelState]):
    """Averages each array over the clients that have it; the global model is the whole network with its exits."""

    method = depthfl

    def global_model(self) -> nn.Module | None:
        """Return the whole network with its exits; None if none is trained or clients keep BatchNorm's statistics."""
        return self.with_exits()

"""InclusiveFL, client side: only the last exit learns and is evaluated (Liu et al., KDD 2022)."""

from torch import Tensor

from fedhet.algorithms.graphs.exits import EXITS, Exits
from fedhet.methods.included.inclusivefl import InclusiveFLParameters
from fedhet.models.representation import Output

from .depthfl import ByDepth  # noqa: TID251 - this folder is fedhet.client_apps


class LastExit(Exits):
    """A network with exits that returns the outputs of the last one, also in evaluation."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the class scores (n, classes) of the last exit."""
        if self.depth < self.count:
            with Output(self, f"{EXITS}.{self.depth - 1}").capture() as last:
                super().forward(inputs)
            return last.features
        self.network.training = self.training
        scores: Tensor = self.network(inputs)
        return scores


class InclusiveFL(ByDepth[InclusiveFLParameters]):
    """Trains its first blocks and their last exit, or the network's head if it has all."""

    kind = LastExit

"""InclusiveFL, client side: only the last exit is trained and evaluated (Liu et al., KDD 2022)."""

from torch import Tensor

from fedhet.algorithms.graphs.blocks import EXITS, Exits
from fedhet.methods.included.submodels import InclusiveFLOptions
from fedhet.models.representation import Output

from .depthfl import ByDepth  # noqa: TID251 - this folder is fedhet.client_apps


class LastExit(Exits):
    """A network with exits (classifiers after blocks) that returns the outputs of the last exit, also in evaluation."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the class scores (n, classes) of the last exit."""
        if self.depth < self.count:
            with Output(self, f"{EXITS}.{self.depth - 1}").capture() as last:
                super().forward(inputs)
            return last.features
        self.network.training = self.training
        scores: Tensor = self.network(inputs)
        return scores


class InclusiveFL(ByDepth[InclusiveFLOptions]):
    """Trains the client's first blocks and their last exit, or the network's head if the client has all blocks."""

    kind = LastExit

"""Client side of InclusiveFL: trains the client's blocks and their last exit (the head if it has all blocks)."""

from torch import Tensor

from fedhet.algorithms.graphs.blocks import EXITS, Exits
from fedhet.models.representation import Output
from fedhet.strategies.inclusivefl import Keys

from .families.submodels import ByDepth


class LastExit(Exits):
    """A network with exits (classifiers after blocks) that returns the outputs of the last exit, also in evaluation."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.depth < self.count:
            with Output(self, f"{EXITS}.{self.depth - 1}").capture() as last:
                super().forward(inputs)
            return last()
        self.network.training = self.training
        return self.network(inputs)


class InclusiveFL(ByDepth[Keys]):
    kind = LastExit

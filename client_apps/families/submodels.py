"""Base class of client sides that train the first blocks of a network, with an exit (classifier) after each block."""

from typing import ClassVar, TypeVar, cast

from torch import Tensor, nn

from fedhet.algorithms.graphs import PermutationGroups, Submodel
from fedhet.algorithms.graphs.blocks import EXITS, Exits, groups_by_depth
from fedhet.client import ClientSide
from fedhet.methods.options import Config
from fedhet.strategies.families.submodels import DepthKeys

D = TypeVar("D", bound=DepthKeys)


class FirstBlocks(Submodel):
    """A client's part of a network: its first blocks, with an exit after each block."""

    @classmethod
    def groups_of(cls, model: nn.Module, inputs: Tensor) -> PermutationGroups:
        return groups_by_depth(cast(Exits, model), inputs)

    def cut(self, model: nn.Module) -> nn.Module:
        cast(Exits, model).add_exits(self.groups)
        part = cast(Exits, super().cut(model))
        part.depth = len(self.units[0])
        return part


class ByDepth(ClientSide[D]):
    """Base class of client sides that train a network's first blocks; `kind` is the class of the network with exits."""

    parts = FirstBlocks
    kind: ClassVar[type[Exits]] = Exits

    @classmethod
    def adapt(cls, model: nn.Module, config: Config) -> nn.Module:
        keys = config.options
        return cls.kind(model, count=keys.largest, names=keys.blocks)

    @classmethod
    def head_of(cls, config: Config) -> str:
        return f"{EXITS}.0" if config.options.largest > 1 else config.head

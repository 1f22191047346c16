"""The size of a client's part of a common network."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedhet.graphs import PermutationGroups, cut_out, entries_of, resize


@dataclass(frozen=True)
class Size:
    """A share of the units of each of a network's hidden layers, rounded up.

    Attributes:
        width: the share.
        groups: the whole network's permutation groups.
    """

    width: float
    groups: PermutationGroups

    @cached_property
    def units(self) -> dict[int, "np.ndarray[tuple[int], np.dtype[np.int64]]"]:
        """The units of each group that a network of this size is cut out with: as many of the first ones."""
        return {group.index: np.arange(math.ceil(round(group.width * self.width, 6))) for group in self.groups}

    def cut(self, model: nn.Module) -> nn.Module:
        """A network of this size; the whole network itself, if that is the size."""
        return model if self.width == 1 else resize(model, self.state(model))

    def state(self, model: nn.Module) -> Mapping[str, Tensor]:
        """The state dict of a network of this size, from that of the whole."""
        whole = model.state_dict()
        if self.width == 1:
            return whole
        parts = {name: whole[name] for name in entries_of(self.groups, self.units)}
        return whole | {n: torch.from_numpy(array) for n, array in cut_out(parts, self.groups, self.units).items()}

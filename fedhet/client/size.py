"""The size of a client's part of a common network."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
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

    @property
    def whole(self) -> "Size":
        """The size of the whole network."""
        return replace(self, width=1.0)

    @cached_property
    def units(self) -> dict[int, "np.ndarray[tuple[int], np.dtype[np.int64]]"]:
        """The units of each group that a network of this size is cut out with: as many of the first ones."""
        return {group.index: np.arange(math.ceil(round(group.width * self.width, 6))) for group in self.groups}

    def cut(self, model: nn.Module) -> nn.Module:
        """A network of this size; the whole network itself, if that is the size."""
        if self.width == 1:
            return model
        state = self.state(model)
        return resize(model, state, model.state_dict().keys() - state.keys())

    def state(self, model: nn.Module) -> Mapping[str, Tensor]:
        """The state dict of a network of this size, from that of the whole."""
        whole = model.state_dict()
        if self.width == 1:
            return whole
        entries = entries_of(self.groups, self.units)
        kept = {name: tensor for name, tensor in whole.items() if entries.get(name) != ()}
        parts = {name: whole[name] for name, axes in entries.items() if axes}
        return kept | {n: torch.from_numpy(array) for n, array in cut_out(parts, self.groups, self.units).items()}

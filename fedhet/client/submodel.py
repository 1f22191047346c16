"""Parts of one network, for methods whose clients train parts of different sizes (HeteroFL, DepthFL, LoRA, ...)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedhet.algorithms.graphs import PermutationGroups, cut_out, entries_of, resizable_groups, resize


@dataclass(frozen=True)
class Submodel:
    """A client's part of a network: a fraction of the units of each hidden layer, rounded up.

    `width` is the fraction, above 0 and at most 1, and `groups` are the whole network's permutation groups (sets of
    units that are selected together).
    """

    width: float
    groups: PermutationGroups

    @classmethod
    def groups_of(cls, model: nn.Module, inputs: Tensor) -> PermutationGroups:
        """Return the groups of hidden units whose number is reduced in a smaller network; by default all.

        `model` is the network as `ClientSide.adapt` returns it, and `inputs` are two transformed examples.
        """
        return resizable_groups(model, inputs, partly=True)

    @property
    def whole(self) -> Self:
        """The part that is the whole network (width 1)."""
        return replace(self, width=1.0)

    @cached_property
    def units(self) -> dict[int, NDArray[np.int64]]:
        """Indices of this part's units in each group: the first units of the group."""
        return {group.index: np.arange(math.ceil(round(group.width * self.width, 6))) for group in self.groups}

    def cut(self, model: nn.Module) -> nn.Module:
        """Return this part of a newly built network, or the network itself if the width is 1."""
        if self.width == 1:
            return model
        state = self.state(model)
        return resize(model, state, model.state_dict().keys() - state.keys())

    def state(self, model: nn.Module, units: Mapping[int, NDArray[np.int64]] | None = None) -> Mapping[str, Tensor]:
        """Return the state dict of this part of the network `model`; `units` selects other units of each group."""
        units = units or self.units
        whole = model.state_dict()
        if self.width == 1:
            return whole
        entries = entries_of(self.groups, units)
        kept = {name: tensor for name, tensor in whole.items() if entries.get(name) != ()}
        parts = {name: whole[name] for name, axes in entries.items() if axes}
        return kept | {n: torch.from_numpy(array) for n, array in cut_out(parts, self.groups, units).items()}

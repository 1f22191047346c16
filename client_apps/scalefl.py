"""Client side of ScaleFL: trains the exits of its part of the network, the first blocks with fewer units."""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedhet.algorithms.graphs import PermutationGroups, resizable_groups
from fedhet.algorithms.graphs.axes import Segment
from fedhet.algorithms.graphs.blocks import EXITS, Exits, groups_by_depth
from fedhet.client import Payload, Phase, Step, Term
from fedhet.models.representation import Output
from fedhet.strategies.scalefl import Keys

from .families.submodels import ByDepth, FirstBlocks


class NarrowBlocks(FirstBlocks):
    """A client's part of a network: its first blocks with a fraction of the units of each hidden layer, and exits.

    Group 0 of `groups` has the blocks, and each other one the units of hidden layers.
    """

    @classmethod
    def groups_of(cls, model: nn.Module, inputs: Tensor) -> PermutationGroups:
        by_depth = groups_by_depth(cast(Exits, model), inputs)
        whole = deepcopy(cast(Exits, model))
        whole.add_exits(by_depth)
        by_width = resizable_groups(whole, inputs, partly=True)

        groups = [replace(group, index=group.index + 1) for group in by_width]
        axes = dict(by_depth.axes)
        for name, segments in by_width.axes.items():
            axes[name] = tuple(tuple(after_blocks(segment) for segment in axis) for axis in segments)
        return replace(by_depth, groups=(by_depth[0], *groups), axes=axes)

    @cached_property
    def share(self) -> float:
        """The fraction of the units of each hidden layer; see `Keys.all_sizes`."""
        size = round(self.width * self.groups[0].width, 6)
        return size - math.ceil(size) + 1

    @cached_property
    def units(self) -> dict[int, NDArray[np.int64]]:
        """Indices of the blocks and units that the client has, by index of the group."""
        blocks, *others = self.groups
        kept = {group.index: np.arange(math.ceil(round(group.width * self.share, 6))) for group in others}
        return {0: np.arange(math.ceil(round(blocks.width * self.width, 6)))} | kept

    def cut(self, model: nn.Module) -> nn.Module:
        part = super().cut(model)
        slots = [slot for group in [*self.groups][1:] for slot in group.rows + group.completes if self.share < 1]
        for name in {slot.parameter.rpartition(".")[0]: None for slot in slots}:
            layer = part.get_submodule(name)
            if isinstance(layer, nn.Linear | _ConvNd | nn.Embedding):
                layer.register_forward_hook(lambda module, inputs, outputs: outputs / self.share)
        return part


def after_blocks(segment: Segment) -> Segment:
    """Return a segment of units with the index that its group has after that of the blocks."""
    return segment if segment.group is None else replace(segment, group=segment.group + 1)


class ScaleFL(ByDepth[Keys]):
    parts = NarrowBlocks

    def handshake(self, payload: Payload) -> Payload:
        self.client.check_scores("which its exits exchange")
        return super().handshake(payload)

    def phases(self, payload: Payload) -> Sequence[Phase]:
        client = self.client
        model = cast(Exits, client.model)
        names = [f"{EXITS}.{number}" for number in range(model.depth - 1)]
        late = client.request.round > client.config.rounds / 4
        constants = {"gamma": self.options.gamma if late else 0.0, "temperature": self.options.temperature}
        exits = {name: Output(model, name) for name in names}
        terms = (Term(earlier_exits, captures=exits, weighted=True, **constants),) if exits else ()
        return [replace(phase, task_weight=2 / (model.depth + 1), terms=terms) for phase in super().phases(payload)]


def earlier_exits(step: Step, gamma: float, temperature: float) -> Tensor:
    """Return the weighted losses of all exits but the last, whose loss is the task's."""
    losses = []
    for number, outputs in enumerate(step.captured.values(), 1):
        loss = step.loss(outputs)
        if gamma:
            loss = loss + gamma * temperature**2 * step.divergence(outputs, step.outputs, temperature)
        losses.append(number * loss)
    depth = len(losses) + 1
    return 2 / (depth * (depth + 1)) * torch.stack(losses).sum()

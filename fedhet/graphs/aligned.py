"""Blocks of one network that answer to those of another (FedHARM: Kastellos et al., 2024, section 3.2).

The paper takes the blocks with the least angular divergence between representations, and the Kullback-Leibler
divergence of absolute features in groups, since networks differ in widths and activations. How features are grouped it
does not say; here a block's groups are places in the image: |F| averaged over channels, on a grid of the same size for
all networks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.graphs.blocks import blocks, trunk
from fedhet.graphs.graph import UnsupportedArchitecture
from fedhet.learning import reestimate
from fedhet.representations.descriptors import summarised

GRID = 4
"""Groups along a side of the image."""


@dataclass(frozen=True)
class BlockAlignment:
    """Which blocks of a network answer to those of the reference.

    Attributes:
        reference: the reference's blocks, from shallow to deep, by name.
        candidates: the network's, likewise.
        angles: (reference blocks, candidates), the mean angle between the two over images, in right angles.
        divergences: likewise the mean symmetric Kullback-Leibler divergence, in nats.
        chosen: for each of the reference's blocks, which candidate.
    """

    reference: tuple[str, ...]
    candidates: tuple[str, ...]
    angles: Tensor
    divergences: Tensor
    chosen: tuple[int, ...]

    @property
    def blocks(self) -> tuple[str, ...]:
        """The network's blocks."""
        return tuple(self.candidates[place] for place in self.chosen)


def align_blocks(
    model: nn.Module, reference: nn.Module, inputs: Tensor, transform: Callable[[Tensor], Tensor], *, count: int
) -> BlockAlignment:
    """Choose a network's blocks, in order, so that angle and divergence to the reference's are least in sum.

    Args:
        model: left in evaluation mode, with BatchNorm's statistics of these images: those of a fresh network let the
            signal die out on the way.
        reference: likewise; its blocks are those of `blocks`.
        inputs: (n, channels, height, width) raw images.
        transform: from raw inputs to a model's.
        count: how many blocks.

    Raises:
        UnsupportedArchitecture: either has fewer blocks.
    """
    example = transform(inputs[:2])
    theirs, own = blocks(reference, example, count=count), trunk(model, example)
    if len(own) < count:
        raise UnsupportedArchitecture(
            f"{type(model).__name__} has {len(own)} modules that return feature maps one after another "
            f"({', '.join(own) or 'none'}), and {count} blocks are needed"
        )
    for network in (reference, model):
        reestimate(network, inputs, transform)
    reference_groups, groups = (
        summarised(network, names, inputs, transform, lambda block, output: grouped(output))
        for network, names in ((reference, theirs), (model, own))
    )
    angles, divergences = (
        torch.stack([torch.stack([measure(one, other) for other in groups]) for one in reference_groups])
        for measure in (angle, divergence)
    )
    return BlockAlignment(theirs, tuple(own), angles, divergences, cheapest(angles + divergences))


def grouped(features: Tensor) -> Tensor:
    """A block's output (n, channels, height, width) as (n, GRID * GRID): the mean of |F| at each place of a grid."""
    return F.adaptive_avg_pool2d(features.abs().mean(1, keepdim=True), GRID).flatten(1)


def angle(one: Tensor, other: Tensor) -> Tensor:
    """The mean angle between rows of (n, groups), none of them negative: 0 to 1, a right angle."""
    return F.cosine_similarity(one, other).clamp(-1, 1).arccos().mean() * 2 / pi


def divergence(one: Tensor, other: Tensor) -> Tensor:
    """The mean over rows of (n, groups) of KL(p, q) + KL(q, p), halved, each row scaled to a sum of 1; in nats."""
    tiny = torch.finfo(one.dtype).eps
    p, q = ((rows + tiny) / (rows + tiny).sum(1, keepdim=True) for rows in (one, other))
    return ((p - q) * (p.log() - q.log())).sum(1).mean() / 2


def cheapest(costs: Tensor) -> tuple[int, ...]:
    """For each row of (rows, columns) a column, each behind the one before it, of the least cost in sum.

    Of equal choices the one whose last column is the first.
    """
    rows, columns = costs.shape
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] * (columns + 1)  # within the first so many columns
    for row in range(rows):
        reached: list[tuple[float, tuple[int, ...]]] = [(torch.inf, ())]
        for column in range(columns):
            cost, chosen = best[column]
            here = (cost + float(costs[row, column]), (*chosen, column))
            reached.append(min(reached[-1], here, key=lambda each: each[0]))
        best = reached
    return best[-1][1]

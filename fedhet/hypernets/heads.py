"""Heads: from a node's h by z to the arrays of its layer; each type has its own.

Arrays are written for all layers of a type in one product, (layers, *shape), and taken apart by `unbind`: indexing
would cost a zero tensor of the whole size for each of them in the backward pass.
"""

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.hypernets.design import Design, LayerType, Slot
from fedhet.hypernets.starts import BASE


def normalised(z: Tensor) -> Tensor:
    """The same with a mean square of 1 over the last axis."""
    return z * (z.square().mean(-1, keepdim=True) + 1e-8).rsqrt()


class Latents(nn.Module):
    """z, the normalised hidden layer of a type's head, and s, a factor of its weights: MLPs of two layers.

    z is LeakyReLU(W1 h + b1) at unit RMS, and s = 1 + w . LeakyReLU(W1' h + b1'). The first layers of all types are one
    product: in small networks it is the number of calls that costs.
    """

    def __init__(self, types: Sequence[str], latent: int, design: Design) -> None:
        super().__init__()
        self.latent, self.normalise = latent, design.normalise
        self.weight, self.bias, self.factor = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        hidden = latent + (design.latent if design.scale else 0)
        for type in types:
            self.weight[type] = nn.Parameter(torch.empty(hidden, design.width))
            self.bias[type] = nn.Parameter(torch.empty(hidden))
            if design.scale:
                self.factor[type] = nn.Parameter(torch.empty(design.latent))

    def forward(self, h: Tensor, types: Sequence[str], row: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gives z (nodes, latent) and s (nodes,), or None if it is not predicted.

        Args:
            h: (nodes, width).
            types: those that occur, each once.
            row: (nodes,) int64, each node's place in `types`.
        """
        weight = torch.stack([self.weight[type] for type in types])[row]
        bias = torch.stack([self.bias[type] for type in types])[row]
        hidden = F.leaky_relu(torch.baddbmm(bias[..., None], weight, h[..., None])[..., 0])
        z = hidden[:, : self.latent]
        z = normalised(z) if self.normalise else z
        if not self.factor:
            return z, None
        factor = torch.stack([self.factor[type] for type in types])[row]
        return z, 1 + (hidden[:, self.latent :] * factor).sum(-1)


class Dense(nn.Module):
    """W = sum_l z_l D_l + B, a whole weight for each of z's entries, and B = 0 at first: the paper's head."""

    def __init__(self, shape: tuple[int, ...], latent: int) -> None:
        super().__init__()
        self.dense, self.bias = nn.Parameter(torch.empty(latent, *shape)), nn.Parameter(torch.empty(shape))

    def forward(self, z: Tensor, scale: Tensor | None) -> Tensor:
        """(layers, *shape) of z (layers, latent) and scale (layers,)."""
        bias = self.bias.flatten() if scale is None else scale[:, None] * self.bias.flatten()
        return torch.addmm(bias, _scaled(z, scale), self.dense.flatten(1)).view(-1, *self.bias.shape)


class LowRank(nn.Module):
    """W = U V with U (units, rank) and V (rank, fan-in) linear in z."""

    def __init__(self, shape: tuple[int, ...], latent: int, rank: int) -> None:
        super().__init__()
        self.shape = shape
        units, fan_in = shape[0], prod(shape[1:])
        rank = min(rank, units, fan_in)
        self.left = nn.Parameter(torch.empty(latent, units, rank))
        self.right = nn.Parameter(torch.empty(latent, rank, fan_in))

    def forward(self, z: Tensor, scale: Tensor | None) -> Tensor:
        """(layers, *shape) of z (layers, latent) and scale (layers,)."""
        return (_linear(_scaled(z, scale), self.left) @ _linear(z, self.right)).view(-1, *self.shape)


class BaseLowRank(nn.Module):
    """W = 4 B + U V, a base weight of all layers of a type and a layer's own change, V = 0 at first."""

    def __init__(self, shape: tuple[int, ...], latent: int, rank: int) -> None:
        super().__init__()
        units, fan_in = shape[0], prod(shape[1:])
        rank = min(rank, units, fan_in)
        self.base = nn.Parameter(torch.empty(shape))
        self.basis = nn.Parameter(torch.empty(latent, units, rank))
        self.change = nn.Parameter(torch.empty(latent, rank, fan_in))

    def forward(self, z: Tensor, scale: Tensor | None) -> Tensor:
        """(layers, *shape) of z (layers, latent) and scale (layers,)."""
        base = BASE * self.base.flatten(1)
        base = base if scale is None else base * scale[:, None, None]
        u, v = _linear(_scaled(z, scale), self.basis), _linear(z, self.change)
        return torch.baddbmm(base, u, v).view(-1, *self.base.shape)


def _scaled(z: Tensor, scale: Tensor | None) -> Tensor:
    """Scaling z scales what is linear in it, and is cheaper."""
    return z if scale is None else z * scale[:, None]


def _linear(z: Tensor, maps: Tensor) -> Tensor:
    """sum_l z_l M_l, (layers, ...) of z (layers, latent) and M (latent, ...)."""
    return (z @ maps.flatten(1)).view(-1, *maps.shape[1:])


class Vector(nn.Module):
    """A bias, or what a normalisation multiplies and adds: where it starts plus a linear map of z, at first 0."""

    def __init__(self, slot: Slot, latent: int) -> None:
        super().__init__()
        self.shape, self.start = slot.shape, slot.start
        self.vector = nn.Parameter(torch.empty(latent, prod(slot.shape)))

    def forward(self, z: Tensor, scale: Tensor | None) -> Tensor:
        """(layers, *shape) of z (layers, latent); not scaled."""
        written = z @ self.vector
        return (written + self.start if self.start else written).view(-1, *self.shape)


def head(layer: LayerType, slot: Slot, design: Design) -> nn.Module:
    """The head for one array of a type."""
    if slot.std is None:
        return Vector(slot, design.latent)
    if design.head == "dense":
        return Dense(slot.shape, design.latent)
    kind = BaseLowRank if design.head == "base-lowrank" else LowRank
    return kind(slot.shape, design.latent, design.rank * layer.occurrences)

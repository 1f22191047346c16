"""Heads of a graph hypernetwork, which generate the arrays of a layer from the embedding h of its node.

A head computes arrays from a latent vector z, which is computed from h. The head of a layer type generates an array for
all layers of the type at once, (layers, *shape). `Tiles` is one head for all types, also for types that did not occur
in training: a decoder generates tiles of weights (similar to GHN-2, Knyazev et al., NeurIPS 2021).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import ceil, cos, prod, sin
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.algorithms.hypernets.design import BASE, RANK, WIDTH, Head, LayerType, Slot
from fedhet.utils.randomness import torch_generator

LATENT = 16  # width of a layer's latent vector z, and of the hidden layer that computes its scale s (see `Latents`)
TILE, KERNEL, TILE_LATENT = 16, 3, 128  # a tile's output and input channels, height and width, and width of its z

ROLES = ("weight", "bias", "norm_weight", "norm_bias")
FREQUENCIES = tuple(4.0**-power for power in range(4))
PLACE = 5 * 2 * len(FREQUENCIES)


def normalised(z: Tensor) -> Tensor:
    """Return `z` scaled to a mean square of 1 over the last axis."""
    return z * (z.square().mean(-1, keepdim=True) + 1e-8).rsqrt()


class Latents(nn.Module):
    """A module that computes a latent vector z and a scale s for each layer from its embedding h.

        z = LeakyReLU(W1 h + b1),    s = 1 + w . LeakyReLU(W1' h + b1')

    W1, W1', b1, b1' and w are learned for each layer type in `types`. `normalise` divides z by its root mean square.
    """

    def __init__(self, types: Sequence[str], *, normalise: bool) -> None:
        super().__init__()
        self.normalise = normalise
        self.weight, self.bias, self.factor = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        for type in types:
            self.weight[type] = nn.Parameter(torch.zeros(2 * LATENT, WIDTH))
            self.bias[type] = nn.Parameter(torch.zeros(2 * LATENT))
            self.factor[type] = nn.Parameter(torch.zeros(LATENT))

    def forward(self, h: Tensor, types: Sequence[str], row: Tensor) -> tuple[Tensor, Tensor]:
        """Return latent vectors z (nodes, LATENT), and the scales s (nodes,) that generated weights are multiplied by.

        `h` (nodes, width) has embeddings of layers (nodes), and `row` (nodes,) the index of each one's type in `types`.
        """
        parameters = self.weight, self.bias, self.factor
        weight, bias, factor = (torch.stack([tensors[type] for type in types])[row] for tensors in parameters)
        z, hidden = F.leaky_relu(torch.baddbmm(bias[..., None], weight, h[..., None])[..., 0]).chunk(2, 1)
        return normalised(z) if self.normalise else z, 1 + (hidden * factor).sum(-1)


class Dense(nn.Module):
    """A head that generates weights s (sum_l z_l D_l + B) from latent vector z and scale s, with learned D_l and B."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.dense, self.bias = nn.Parameter(torch.zeros(LATENT, *shape)), nn.Parameter(torch.zeros(shape))

    def forward(self, z: Tensor, scale: Tensor) -> Tensor:
        """Return weights (layers, *shape) from latent vectors z (layers, LATENT), multiplied by `scale` (layers,)."""
        bias = scale[:, None] * self.bias.flatten()
        return torch.addmm(bias, z * scale[:, None], self.dense.flatten(1)).view(-1, *self.bias.shape)


class BaseLowRank(nn.Module):
    """A head that generates weights s (4 B + U V) with the layer's scale s, and a learned matrix B.

    U (units, rank) and V (rank, fan-in) are learned linear maps of the layer's latent vector z. The factor 4 (`BASE`)
    makes a gradient step of B change the weights as much as in a `Dense` head.
    """

    def __init__(self, shape: tuple[int, ...], rank: int) -> None:
        super().__init__()
        units = shape[0]
        fan_in = prod(shape[1:])
        rank = min(rank, units, fan_in)
        self.base = nn.Parameter(torch.zeros(shape))
        self.basis = nn.Parameter(torch.zeros(LATENT, units, rank))
        self.change = nn.Parameter(torch.zeros(LATENT, rank, fan_in))

    def forward(self, z: Tensor, scale: Tensor) -> Tensor:
        """Return weights (layers, *shape) from latent vectors z (layers, LATENT), multiplied by `scale` (layers,)."""
        base = BASE * self.base.view(len(self.base), -1) * scale[:, None, None]
        u = _linear(z * scale[:, None], self.basis)
        v = _linear(z, self.change)
        return torch.baddbmm(base, u, v).view(-1, *self.base.shape)


def _linear(z: Tensor, maps: Tensor) -> Tensor:
    return (z @ maps.flatten(1)).view(-1, *maps.shape[1:])


class Vector(nn.Module):
    """A head that generates vectors, such as biases, without their initial value: a learned linear map of vector z."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.vector = nn.Parameter(torch.zeros(LATENT, prod(shape)))

    def forward(self, z: Tensor, scale: Tensor) -> Tensor:
        """Return vectors (layers, *shape) from latent vectors z (layers, LATENT); `scale` is not used here."""
        return (z @ self.vector).view(-1, *self.shape)


def head(layer: LayerType, slot: Slot, kind: Head) -> nn.Module:
    """Return a head that generates the array `slot` of a layer type: a `Vector` or, for weights, one of this `kind`."""
    if slot.std is None:
        return Vector(slot.shape)
    if kind == "dense":
        return Dense(slot.shape)
    return BaseLowRank(slot.shape, RANK * layer.occurrences)


@dataclass(frozen=True)
class Tiled:
    """Tiles of weights that are decoded together (see `Tiles`), and the arrays that they form.

    Attributes:
        nodes: index of the layer of each tile, (tiles,).
        places: sines and cosines that encode the position of each tile in its array, (tiles, n).
        signs: 1 or -1 for each tile, so that tiles of one array, which resemble each other, do not add up.
        arrays: name, index of the layer, `Slot`, and number of tiles along each axis, for each array.
    """

    nodes: Tensor
    places: Tensor
    signs: Tensor
    arrays: list[tuple[str, int, Slot, tuple[int, ...]]]


def tiling(layers: Iterable[tuple[Mapping[str, str], Mapping[str, Slot]]], device: torch.device) -> dict[str, Tiled]:
    """Divide the arrays of layers into tiles: blocks of equal size, which `Tiles` generates.

    The result has tiles of filters by the key `kernels`, of other weights and 1x1 filters by `matrices`, and of biases
    and other vectors by `vectors`; tensors are on `device`. For each layer, `layers` has two mappings: from an array's
    name within the layer, such as `weight`, to its ``state_dict`` name, and to its `Slot` (shape and initial values).
    """
    arrays: dict[str, list[tuple[str, int, Slot, tuple[int, ...]]]] = {"kernels": [], "matrices": [], "vectors": []}
    nodes, places, signs = ({kind: list[Any]() for kind in arrays} for _ in range(3))
    for node, (names, slots) in enumerate(layers):
        roles = [*ROLES, *(role for role in slots if role not in ROLES)]
        for role, slot in slots.items():
            grid: tuple[int, ...] = (ceil(prod(slot.shape) / TILE),)
            if slot.std is not None:
                sizes = zip(_four(slot.shape), (TILE, TILE, KERNEL, KERNEL), strict=True)
                grid = tuple(ceil(size / side) for size, side in sizes)
                grid = grid if prod(slot.shape[2:]) > 1 else grid[:2]
            kind = {1: "vectors", 2: "matrices", 4: "kernels"}[len(grid)]
            arrays[kind].append((names[role], node, slot, grid))
            number = roles.index(role)
            for place in product(*map(range, grid)):
                numbers = (*place, *(0,) * (4 - len(place)), number)
                nodes[kind].append(node)
                angles = [number * frequency for number in numbers for frequency in FREQUENCIES]
                places[kind].append([wave(angle) for angle in angles for wave in (sin, cos)])
            drawn = torch.randint(2, (prod(grid),), generator=torch_generator(0, "signs of tiles", node, number))
            signs[kind] += (2 * drawn - 1).tolist() if slot.std is not None else [1] * prod(grid)
    tensor = partial(torch.tensor, device=device)
    return {
        kind: Tiled(tensor(nodes[kind]), tensor(places[kind]), tensor(signs[kind]), each)
        for kind, each in arrays.items()
        if each
    }


class Tiles(nn.Module):
    """A single head for all layer types, which decodes tiles of weights.

    Each tile has a latent vector z = LeakyReLU(W h + b + W' p), divided by its root mean square. W, W' and b are
    learned, h is the layer's embedding, and p has sines and cosines of the tile's position in its array. Weights are
    the decoded tiles times the layer's scale s times the initial standard deviation of the weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.node = nn.Linear(WIDTH, TILE_LATENT)
        self.place = nn.Linear(PLACE, TILE_LATENT, bias=False)
        self.tile = nn.Parameter(torch.zeros(TILE_LATENT, TILE, TILE, KERNEL, KERNEL))
        self.vectors = nn.Parameter(torch.zeros(TILE_LATENT, TILE))
        self.scale = nn.Linear(WIDTH, LATENT)
        self.factor = nn.Parameter(torch.zeros(LATENT))

    def forward(self, h: Tensor, tiles: Mapping[str, Tiled]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, value) of each array, from layers' embeddings h (layers, width) and `tiles` from `tiling`."""
        nodes = self.node(h)
        scales = 1 + F.leaky_relu(self.scale(h)) @ self.factor
        middle = KERNEL // 2
        decoders = {"kernels": self.tile, "matrices": self.tile[..., middle, middle], "vectors": self.vectors}
        for kind, tiled in tiles.items():
            z = normalised(F.leaky_relu(nodes[tiled.nodes] + self.place(tiled.places)))
            decoded = tiled.signs[:, None] * (z @ decoders[kind].flatten(1))
            parts = decoded.split([prod(grid) for *_, grid in tiled.arrays])
            for (name, node, slot, grid), part in zip(tiled.arrays, parts, strict=True):
                if slot.std is None:
                    yield name, slot.placed(part.flatten()[: prod(slot.shape)].view(slot.shape))
                else:
                    yield name, slot.placed(_laid(part, slot.shape, grid), slot.std * scales[node])


def _laid(tiles: Tensor, shape: tuple[int, ...], grid: tuple[int, ...]) -> Tensor:
    # Joins tiles into one array, `grid[i]` of them along axis i, and crops it to `shape`.
    sides = (TILE, TILE, KERNEL, KERNEL)[: len(grid)]
    axes = [axis for place in range(len(grid)) for axis in (place, place + len(grid))]
    sizes = [count * side for count, side in zip(grid, sides, strict=True)]
    whole = tiles.view(*grid, *sides).permute(axes).reshape(sizes)
    return whole[tuple(slice(size) for size in _four(shape)[: len(grid)])].reshape(shape)


def _four(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    units, fan_in, *kernel = shape if len(shape) > 1 else (*shape, 1)
    return units, fan_in, *((kernel[0], prod(kernel[1:])) if kernel else (1, 1))

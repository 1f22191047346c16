"""The design of a graph hypernetwork, the layer types that it knows, and its initial values.

Initial values depend on name, shape and seed only, so the server draws them without the hypernetwork. Weights are
generated at the scale of `std_of`: E[z^2] = 1, so sum_l z_l D_l has the variance of D's entries times the width of z.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from fedhet.algorithms.graphs import LayerGraph, LayerNode
from fedhet.utils.randomness import torch_generator

Head = Literal["dense", "base-lowrank", "tiled"]
Shape = tuple[int, ...]

WIDTH, STEPS = 51, 6
"""Width of a node's embedding h, and T, the number of steps of message passing (the paper's)."""

RANK = 4
"""Rank of ``base-lowrank`` heads for each occurrence of a type in one network."""


@dataclass(frozen=True)
class Design:
    """The form of a hypernetwork, the same for all clients.

    Attributes:
        head: ``dense`` (the paper's) or ``base-lowrank`` for a head of each layer type, ``tiled`` for one head.
        normalise: whether h and z have unit variance, so that initial weights have Kaiming's scale. If not, form and
            initialisation are the paper's, with ``dense`` heads.
    """

    head: Head = "base-lowrank"
    normalise: bool = True


@dataclass(frozen=True)
class Slot:
    """An array to generate: a vector with its initial value, or weights with their initial standard deviation."""

    shape: Shape
    start: float = 0.0
    std: float | None = None


@dataclass(frozen=True)
class LayerType:
    """A layer type: the arrays to generate, by role, and its largest number of occurrences in one network."""

    slots: Mapping[str, Slot]
    occurrences: int = 1


Catalogue = Mapping[str, LayerType]
"""Layer types by name, in order of name."""


def catalogue(graphs: Iterable[LayerGraph]) -> Catalogue:
    """Return the layer types of networks. A type has all arrays that any of its layers has, such as a bias."""
    slots: dict[str, dict[str, Slot]] = {}
    most: Counter[str] = Counter()
    for graph in graphs:
        most |= Counter(node.type for node in graph)
        for node in graph:
            slots.setdefault(node.type, {}).update(slots_of(node))
    return {type: LayerType(slots[type], most[type]) for type in sorted(slots)}


def slots_of(node: LayerNode) -> dict[str, Slot]:
    """Return the arrays of a layer to generate, by role: its trained parameters."""
    slots = {}
    for role, shape in node.shapes.items():
        if role in node.constants:
            continue
        # A class token is a vector, whatever axes it has; a linear layer with one output is not.
        if len(shape) > 1 and (role != "value" or sum(size > 1 for size in shape) > 1):
            slots[role] = Slot(shape, std=std_of(node.type, shape))
        else:  # normalisations begin as the identity, PReLU as PyTorch's, all else at 0
            factor = 0.25 if node.type.startswith("prelu") else 1.0
            slots[role] = Slot(shape, factor if role.endswith("weight") else 0.0)
    return slots


def std_of(type: str, shape: Shape) -> float:
    """Return the initial standard deviation of a layer's weights, from its type and their shape (units first).

    It is (2 / fan-in)^.5 (Kaiming's for ReLU, He et al., ICCV 2015), 1 for embeddings (PyTorch's), and 0.02 for what is
    added to them, such as positions (ViT's).
    """
    if type.startswith("embedding"):
        return 1.0
    return 0.02 if type.startswith("parameter") else float((2 / prod(shape[1:])) ** 0.5)


# ---- initial values

BASE = 4.0
"""Factor of a base weight: as with a dense head, a step changes a weight about |z|^2 = 16 times as much."""

PARTS: dict[str, tuple[int, Callable[[str, Shape], float]]] = {
    "base": (2, lambda type, shape: std_of(type, shape) / BASE),  # (units, fan-in axes)
    "dense": (3, lambda type, shape: std_of(type, shape[1:]) / shape[0] ** 0.5),  # (latent, units, fan-in axes)
    # (latent, units, rank), with |U U^T| = O(1), so that a step of V moves W as far as one of the base does.
    "basis": (3, lambda type, shape: float((shape[0] * max(shape[1:])) ** -0.5)),
    "bias": (1, lambda type, shape: 0.0),  # (units, fan-in axes)
    "change": (3, lambda type, shape: 0.0),  # (latent, rank, fan-in)
    "vector": (2, lambda type, shape: 0.0),  # (latent, units)
}
"""Part of a head -> its least number of axes, and its standard deviation from its layer's type and its shape."""


def start(key: str, shape: Shape, seed: int, *, normalise: bool = True) -> Tensor:
    """Return the initial value of a parameter of a `GraphHypernetwork`.

    Args:
        key: its name: `heads.<type>.<role>.<part>`, `latents.<part>.<type>`, `embedding...` or `tiles...`.
        shape: its shape.
        seed: seed of the run.
        normalise: as in `Design`. If not, a dense head is drawn from Xavier's normal distribution times (2 inputs /
            width of z)^.5, as in the paper, and the layer that computes z like PyTorch's linear layers.

    Raises:
        ValueError: a hypernetwork has no parameter of this name and shape.
    """
    parts, generator = key.split("."), torch_generator(seed, "hypernetwork", key)
    part = PARTS.get(parts[-1]) if parts[0] == "heads" and len(parts) == 4 else None
    if parts[0] in ("embedding", "latents", "tiles") and len(parts) > 1:
        part = 1, lambda _, shape: _elsewhere(parts[1 if parts[0] == "latents" else -1], shape)
    if part is None or len(shape) < part[0] or not all(shape):
        raise ValueError(f"a hypernetwork has no parameter {key[:100]} of shape {list(shape)}")
    if key.startswith("embedding.steps") or (not normalise and key.startswith("latents.weight.")):
        # PyTorch's own: messages are weak at first, so layers of one type start alike and training distinguishes them.
        return torch.empty(shape).uniform_(-(shape[-1] ** -0.5), shape[-1] ** -0.5, generator=generator)
    std = part[1](parts[1], shape)
    if not normalise and parts[-1] == "dense":  # (latent, units, inputs, kernel's axes)
        std = float((2 / (shape[0] + prod(shape[1:])) * 2 * shape[2] / shape[0]) ** 0.5)
    value = torch.zeros(shape)
    return value.normal_(std=std, generator=generator) if std else value


def _elsewhere(part: str, shape: Shape) -> float:
    """Return the standard deviation of a parameter outside of heads of types."""
    if part in ("factor", "vectors") or "bias" in part:
        return 0.0
    if part == "tile":  # (latent, tile, tile, 3, 3); the fan-in is not the tile's
        return float(shape[0] ** -0.5)
    return 1.0 if len(shape) < 2 else float(shape[-1] ** -0.5)

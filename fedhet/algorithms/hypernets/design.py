"""The design of a graph hypernetwork, the layer types it is built for, and its values before training.

A value before training depends on its name, its shape and a seed alone, so whoever makes the values need not have the
hypernetwork. Weights are written at the scale of `std_of`: E[z^2] = 1, so sum_l z_l D_l has the variance of D's entries
times the width of z.
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


@dataclass(frozen=True)
class Design:
    """How a hypernetwork is built; the same for all clients.

    Attributes:
        head: what writes the weights of one type: ``dense`` (the paper's) or ``base-lowrank``; ``tiled`` is one head
            for all types.
        rank: of ``base-lowrank``, for each time that a type occurs in one network, at most.
        width: of a node's embedding h.
        steps: T, messages passed.
        normalise: whether h and z have unit variance, so that weights begin at Kaiming's scale; else the form and the
            initialisation are the paper's, whose head is ``dense``.
    """

    head: Head = "base-lowrank"
    rank: int = 4
    width: int = 51
    steps: int = 6
    normalise: bool = True


@dataclass(frozen=True)
class Slot:
    """One array that is written: a vector with its value before training, or weights with their standard deviation."""

    shape: Shape
    start: float = 0.0
    std: float | None = None


@dataclass(frozen=True)
class LayerType:
    """A layer type: the arrays that are written, by role, and how often it occurs in the network with most of them."""

    slots: Mapping[str, Slot]
    occurrences: int = 1


Catalogue = Mapping[str, LayerType]
"""Layer types by name, in order of name."""


def catalogue(graphs: Iterable[LayerGraph]) -> Catalogue:
    """The layer types of networks; of equal types with different arrays (one with a bias, one without) all of them."""
    slots: dict[str, dict[str, Slot]] = {}
    most: Counter[str] = Counter()
    for graph in graphs:
        most |= Counter(node.type for node in graph)
        for node in graph:
            slots.setdefault(node.type, {}).update(slots_of(node))
    return {type: LayerType(slots[type], most[type]) for type in sorted(slots)}


def slots_of(node: LayerNode) -> dict[str, Slot]:
    """Return the parameters of a layer to generate, by role: those that are trained."""
    slots = {}
    for role, shape in node.shapes.items():
        if role in node.constants:
            continue
        # A class token is a vector, whatever axes it has; a linear layer with one output is none.
        if len(shape) > 1 and (role != "value" or sum(size > 1 for size in shape) > 1):
            slots[role] = Slot(shape, std=std_of(node.type, shape))
        else:  # normalisations begin as the identity, PReLU as PyTorch's, all else at 0
            factor = 0.25 if node.type.startswith("prelu") else 1.0
            slots[role] = Slot(shape, factor if role.endswith("weight") else 0.0)
    return slots


def std_of(type: str, shape: Shape) -> float:
    """The standard deviation of a layer's weights before training, by its type and their shape, units first.

    Kaiming's for ReLU, (2 / fan-in)^.5 (He et al., ICCV 2015); PyTorch's 1 for embeddings, and .02 for what is added
    to them, such as positions (ViT's).
    """
    if type.startswith("embedding"):
        return 1.0
    return 0.02 if type.startswith("parameter") else float((2 / prod(shape[1:])) ** 0.5)


# ---- values before training

BASE = 4.0
"""Factor of a base weight: a step moves a weight about |z|^2 = 16 times as far through the dense head, and so here."""

PARTS: dict[str, tuple[int, Callable[[str, Shape], float]]] = {
    "base": (2, lambda type, shape: std_of(type, shape) / BASE),  # (units, fan-in axes)
    "dense": (3, lambda type, shape: std_of(type, shape[1:]) / shape[0] ** 0.5),  # (latent, units, fan-in axes)
    # (latent, units, rank), with |U U^T| = O(1), so that a step of V moves W as far as one of the base does.
    "basis": (3, lambda type, shape: float((shape[0] * max(shape[1:])) ** -0.5)),
    "bias": (1, lambda type, shape: 0.0),  # (units, fan-in axes)
    "change": (3, lambda type, shape: 0.0),  # (latent, rank, fan-in)
    "vector": (2, lambda type, shape: 0.0),  # (latent, units)
}
"""Of each part of a head its number of axes, at least, and its standard deviation by its layer's type and its shape."""


def start(key: str, shape: Shape, seed: int, *, normalise: bool = True) -> Tensor:
    """A parameter of a `GraphHypernetwork` before training; a ValueError if it has none of this name and shape.

    Args:
        key: its name; of a head `heads.<type>.<role>.<part>`, of what heads are given `latents.<part>.<type>`.
        shape: its shape.
        seed: of the run.
        normalise: as in `Design`; if not, what a dense head's z is multiplied with is drawn as the paper says (Xavier's
            normal times (2 inputs / width of z)^.5), and what z is made with as PyTorch's linear layers are.
    """
    parts, generator = key.split("."), torch_generator(seed, "hypernetwork", key)
    part = PARTS.get(parts[-1]) if parts[0] == "heads" and len(parts) == 4 else None
    if parts[0] in ("embedding", "latents", "tiles") and len(parts) > 1:
        part = 1, lambda _, shape: _elsewhere(parts[1 if parts[0] == "latents" else -1], shape)
    if part is None or len(shape) < part[0] or not all(shape):
        raise ValueError(f"a hypernetwork has no parameter {key[:100]} of shape {list(shape)}")
    if key.startswith("embedding.steps") or (not normalise and key.startswith("latents.weight.")):
        # PyTorch's own: messages are faint at first, so layers of one type begin alike and training tells them apart.
        return torch.empty(shape).uniform_(-(shape[-1] ** -0.5), shape[-1] ** -0.5, generator=generator)
    std = part[1](parts[1], shape)
    if not normalise and parts[-1] == "dense":  # (latent, units, inputs, kernel's axes)
        std = float((2 / (shape[0] + prod(shape[1:])) * 2 * shape[2] / shape[0]) ** 0.5)
    value = torch.zeros(shape)
    return value.normal_(std=std, generator=generator) if std else value


def _elsewhere(part: str, shape: Shape) -> float:
    """The standard deviation of a parameter outside of the types' heads."""
    if part in ("factor", "vectors") or "bias" in part:
        return 0.0
    if part == "tile":  # (latent, tile, tile, 3, 3); the fan-in is not the tile's
        return float(shape[0] ** -0.5)
    return 1.0 if len(shape) < 2 else float(shape[-1] ** -0.5)

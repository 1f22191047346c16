"""The design of a graph hypernetwork, and the layer types it is built for."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from fedhet.graphs import LayerGraph, LayerNode

Head = Literal["dense", "lowrank", "base-lowrank", "tiled"]


@dataclass(frozen=True)
class Design:
    """How a hypernetwork is built; the same for all clients.

    Attributes:
        head: what writes the weights of one type: ``dense`` (the paper's), ``lowrank``, ``base-lowrank``, or ``tiled``,
            which is one for all types.
        rank: of the low-rank heads, for each time that a type occurs in one network, at most.
        latent: width of z, which heads are given.
        tile: channels in and out of a tile.
        tile_latent: width of z of the tiled head.
        width: of a node's embedding h.
        steps: T, messages passed.
        scale: whether a factor s of the weights is predicted apart.
        normalise: whether h and z have unit variance, so that weights begin at Kaiming's scale; else the form and the
            initialisation are the paper's, whose head is ``dense``.
    """

    head: Head = "base-lowrank"
    rank: int = 4
    latent: int = 16
    tile: int = 16
    tile_latent: int = 128
    width: int = 51
    steps: int = 6
    scale: bool = True
    normalise: bool = True


@dataclass(frozen=True)
class Slot:
    """One array that is written.

    Attributes:
        shape: of it.
        start: of vectors, what they are before training.
        std: of weights, their standard deviation before training.
    """

    shape: tuple[int, ...]
    start: float = 0.0
    std: float | None = None


@dataclass(frozen=True)
class LayerType:
    """A layer type, as the hypernetwork needs to know it.

    Attributes:
        slots: what is written of such a layer, by role.
        occurrences: in the network that has most of them.
    """

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
    """The parameters of a layer that are written, by role; BatchNorm's statistics are not."""
    found = {}
    for role, shape in node.shapes.items():
        if "running_" in role:
            continue
        # A class token is a vector, whatever axes it has; a linear layer with one output is none.
        vector = len(shape) < 2 or (role == "value" and sum(size > 1 for size in shape) < 2)
        if vector:
            found[role] = Slot(shape, _start(node.type, role))
        else:
            found[role] = Slot(shape, std=std_of(node.type, shape))
    return found


def std_of(type: str, shape: tuple[int, ...]) -> float:
    """The standard deviation of a layer's weights before training.

    Kaiming's for ReLU, (2 / fan-in)^.5 (He et al., ICCV 2015); PyTorch's 1 for embeddings, and .02 for what is added
    to them, such as positions (ViT's).

    Args:
        type: the layer's.
        shape: of its weight, units first; the other axes are what is summed over.
    """
    if type.startswith("embedding"):
        return 1.0
    return 0.02 if type.startswith("parameter") else float((2 / prod(shape[1:])) ** 0.5)


def _start(type: str, role: str) -> float:
    """Of a vector: normalisations begin as the identity, PReLU as PyTorch's, all else at 0."""
    if not role.endswith("weight"):
        return 0.0
    return 0.25 if type.startswith("prelu") else 1.0

"""The layer types that a graph hypernetwork knows, and the initial values of its parameters.

Initial values depend on name, shape and seed only, so the server draws them without building the hypernetwork. A head
generates weights sum_l z_l D_l from a latent vector z with E[z_l^2] = 1. Its arrays D_l have the standard deviation
std / (width of z)^.5, so that the standard deviation of the weights is std, the result of `std_of`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from fedhet.algorithms.graphs import LayerGraph, LayerNode
from fedhet.models.copies import Start
from fedhet.utils.randomness import torch_generator

Head = Literal["dense", "base-lowrank", "tiled"]
"""Kinds of heads, which generate weights from latent vectors. ``dense`` (a linear map; Litany et al., 2022) and
``base-lowrank`` (learned weights plus a generated matrix of low rank) have a head for each layer type. ``tiled`` has a
single head, which generates tiles (blocks of weights), of which the weights of all layers are composed."""
Shape = tuple[int, ...]

WIDTH, STEPS = 51, 6
"""Width of a layer's embedding h, and number of steps of message passing."""

RANK = 4
"""The rank of U V in a `BaseLowRank` head is RANK times the largest number of layers of its type in one network."""


@dataclass(frozen=True)
class Slot:
    """An array to generate, with initial mean `start` and, for weights, initial standard deviation `std`.

    `std` is None for vectors, and `scale` is the ratio of `std` to that of He's rule, the result of `std_of`.
    """

    shape: Shape
    start: float = 0.0
    std: float | None = None
    scale: float = 1.0

    def placed(self, array: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        """Return a generated `array` times `scale`, plus the initial mean."""
        array = array if isinstance(scale, float) and scale == 1 else array * scale
        return array + self.start if self.start else array


@dataclass(frozen=True)
class LayerType:
    """A layer type: its arrays (`slots`) by name, such as ``weight``, and how often it occurs in a network at most."""

    slots: Mapping[str, Slot]
    occurrences: int = 1


Catalogue = Mapping[str, LayerType]
"""Layer types of several networks by name, such as `l64_10` (see `LayerNode`), sorted by name."""


def catalogue(graphs: Iterable[LayerGraph]) -> Catalogue:
    """Return the layer types of the networks with these graphs, by name; each type has the arrays of all its layers."""
    slots: dict[str, dict[str, Slot]] = {}
    most: Counter[str] = Counter()
    for graph in graphs:
        most |= Counter(node.type for node in graph)
        for node in graph:
            slots_by_role = slots.setdefault(node.type, {})
            # An array with a constant initial value does not replace one that is drawn.
            drawn = {role for role, slot in slots_by_role.items() if slot.std is not None}
            slots_by_role |= {role: s for role, s in slots_of(node).items() if s.std is not None or role not in drawn}
    return {type: LayerType(slots[type], most[type]) for type in sorted(slots)}


def slots_of(node: LayerNode) -> dict[str, Slot]:
    """Return shape and initial values (a `Slot`) of each trained parameter of a layer, by name, such as ``weight``."""
    slots = {}
    for role, shape in node.shapes.items():
        if role in node.constants:
            continue
        own = node.starts.get(role)
        rule = std_of(node.type, shape)
        drawn = own is not None if role == "value" else len(shape) > 1
        if own is not None and not own.std:
            slots[role] = Slot(shape, own.mean)
        elif drawn:
            # Tokens that were all equal would stay equal. Weights of weight_norm are far from 0.
            start = own.mean if own is not None and role == "value" and abs(own.mean) > own.std else 0.0
            scale = scale_of(own, rule, shape)
            slots[role] = Slot(shape, start, rule * scale, scale)
        else:  # normalisations begin as the identity, PReLU as PyTorch's, all else at 0
            factor = 0.25 if node.type.startswith("prelu") else 1.0
            slots[role] = Slot(shape, factor if role.endswith("weight") else 0.0)
    return slots


def scale_of(own: Start | None, rule: float, shape: Shape) -> float:
    """Return the ratio of an array's standard deviation in a new network, `own.std`, to that of He's rule, `rule`.

    The result is 1 if `own` is None or the ratio is between 1/3 and 1.5 (for arrays of few entries, a wider range):
    with PyTorch's default initialisation, whose ratio is 0.41, activations would vanish. If `own.exact`, it is always
    the ratio.
    """
    ratio = own.std / rule if own else 1.0
    margin = prod(shape) ** -0.5
    if own is not None and own.exact:
        return ratio
    return 1.0 if (1 - margin) / 3 < ratio < 1.5 * (1 + margin) else ratio


def std_of(type: str, shape: Shape) -> float:
    """Return the initial standard deviation of weights of a layer type (see `LayerNode`), with `shape` (units, ...).

    It is (2 / fan-in)^.5 (He et al., ICCV 2015), 1 for embeddings, and 0.02 outside layers (ViT's position embeddings).
    """
    if type.startswith("embedding"):
        return 1.0
    return 0.02 if type.startswith("parameter") else float((2 / prod(shape[1:])) ** 0.5)


BASE = 4.0
"""Factor of the learned weights in a `BaseLowRank` head. As latent vectors have the length BASE, a gradient step then
changes generated weights as much as in a `Dense` head."""

PARTS: dict[str, Callable[[str, Shape], float]] = {
    "base": lambda type, shape: std_of(type, shape) / BASE,  # (units, fan-in axes)
    "dense": lambda type, shape: std_of(type, shape[1:]) / shape[0] ** 0.5,  # (latent, units, fan-in axes)
    # (latent, units, rank), with |U U^T| = O(1), so that a step of V moves W as far as one of the base does.
    "basis": lambda type, shape: float((shape[0] * max(shape[1:])) ** -0.5),
    **dict.fromkeys(("bias", "change", "vector"), lambda type, shape: 0.0),
}
"""By name of a hypernetwork head's parameter: its initial standard deviation, from a layer's type and shape."""


def start(key: str, shape: Shape, seed: int, *, normalise: bool = True) -> Tensor:
    """Return the initial value of a parameter of a `GraphHypernetwork`; raise a ValueError for unknown parameters.

    `key` is its name: `heads.<layer type>.<array's role>.<part of head>` (see `PARTS`), `latents.<part>.<layer type>`
    (computes the latent vector z), `embedding...` (embeds layers) or `tiles...` (``tiled`` head). If `normalise` is
    False, the layer that computes z starts as nn.Linear in PyTorch, and a ``dense`` head from Xavier's normal
    distribution times (2 n / w)^.5, with n inputs of the generated layer and w entries of z (Litany et al., 2022).
    """
    parts = key.split(".")
    generator = torch_generator(seed, "hypernetwork", key)
    try:
        if key.startswith("embedding.steps") or (not normalise and key.startswith("latents.weight.")):
            # As in PyTorch: messages are weak at first, so layers of one type start alike; training distinguishes them.
            return torch.empty(shape).uniform_(-(shape[-1] ** -0.5), shape[-1] ** -0.5, generator=generator)
        if parts[0] == "heads":
            std = PARTS[parts[3]](parts[1], shape)
        else:
            part = parts[{"embedding": -1, "latents": 1, "tiles": -1}[parts[0]]]
            std = 1.0 if len(shape) < 2 else float(shape[-1] ** -0.5)
            if part in ("factor", "vectors") or "bias" in part:
                std = 0.0
            elif part == "tile":  # (latent, tile, tile, 3, 3); the fan-in is not the tile's
                std = float(shape[0] ** -0.5)
        if not normalise and parts[-1] == "dense":  # (latent, units, inputs, kernel's axes)
            std = float((2 / (shape[0] + prod(shape[1:])) * 2 * prod(shape[2:3]) / shape[0]) ** 0.5)
    except (LookupError, ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"the client's hypernetwork has a parameter {key[:100]} of shape {list(shape)}, which is unknown to "
            "this version of fedhet: install one version on the server and all clients"
        ) from error
    return torch.empty(shape).normal_(std=std, generator=generator) if std else torch.zeros(shape)

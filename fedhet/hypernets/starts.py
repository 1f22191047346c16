"""A hypernetwork's values before training, each from its name, its shape and a seed.

Since a value depends on nothing else, hypernetworks for different layer types agree in what they have in common, and
whoever makes the values need not have the hypernetwork. All are such that weights are written at the scale of
`fedhet.hypernets.design.std_of`: E[z^2] = 1, so sum_l z_l D_l has the variance of D's entries times the width of z.
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from fedhet.hypernets.design import std_of
from fedhet.randomness import torch_generator

BASE = 4.0
"""Factor of a base weight: a step moves a weight about |z|^2 = 16 times as far through the dense head, and so here."""

Shape = tuple[int, ...]
PARTS: dict[str, tuple[int, Callable[[str, Shape], float]]] = {
    "base": (2, lambda type, shape: std_of(type, shape) / BASE),  # (units, fan-in axes)
    "dense": (3, lambda type, shape: std_of(type, shape[1:]) / shape[0] ** 0.5),  # (latent, units, fan-in axes)
    "left": (3, lambda type, shape: float((shape[0] * shape[2]) ** -0.5)),  # (latent, units, rank)
    # The same with |U U^T| = O(1), so that a step of V moves W as far as one of the base does.
    "basis": (3, lambda type, shape: float((shape[0] * max(shape[1:])) ** -0.5)),
    "right": (3, lambda type, shape: std_of(type, shape[1:]) / shape[0] ** 0.5),  # (latent, rank, fan-in)
    "bias": (1, lambda type, shape: 0.0),  # (units, fan-in axes)
    "change": (3, lambda type, shape: 0.0),  # (latent, rank, fan-in)
    "vector": (2, lambda type, shape: 0.0),  # (latent, units)
}
"""Of each part of a head its number of axes, at least, and its standard deviation by its layer's type and its shape."""

GROUPS = ("embedding", "latents", "tiles")
"""Where its other parameters are."""


def start(key: str, shape: Shape, seed: int, *, normalise: bool = True) -> Tensor:
    """A parameter of a `GraphHypernetwork` before training.

    Args:
        key: its name; of a head `heads.<type>.<role>.<part>`, of what heads are given `latents.<part>.<type>`.
        shape: its shape.
        seed: of the run.
        normalise: as in `Design`; if not, what a dense head's z is multiplied with is drawn as the paper says (Xavier's
            normal times (2 inputs / width of z)^.5), and what z is made with as PyTorch's linear layers are.

    Raises:
        ValueError: a hypernetwork has no such parameter.
    """
    parts, generator = key.split("."), torch_generator(seed, "hypernetwork", key)
    part = PARTS.get(parts[-1]) if parts[0] == "heads" and len(parts) == 4 else None
    if part is None and parts[0] in GROUPS and len(parts) > 1:
        part = 1, lambda _, shape: _elsewhere(parts[1 if parts[0] == "latents" else -1], shape)
    if part is None or len(shape) < part[0] or not all(shape):
        raise ValueError(f"a hypernetwork has no parameter {key[:100]} of shape {list(shape)}")
    if key.startswith("embedding.steps") or (not normalise and key.startswith("latents.weight.")):
        # PyTorch's own: messages are faint at first, so layers of one type begin alike and training tells them apart.
        return torch.empty(shape).uniform_(-(shape[-1] ** -0.5), shape[-1] ** -0.5, generator=generator)
    std = part[1](parts[1], shape) if normalise or parts[-1] != "dense" else _papers(shape)
    value = torch.zeros(shape)
    return value.normal_(std=std, generator=generator) if std else value


def _papers(shape: Shape) -> float:
    """Of a dense head's array (latent, units, inputs, kernel's axes): Xavier's times (2 inputs / latent)^.5."""
    return float((2 / (shape[0] + prod(shape[1:])) * 2 * shape[2] / shape[0]) ** 0.5)


def _elsewhere(part: str, shape: Shape) -> float:
    if part in ("factor", "vectors") or "bias" in part:
        return 0.0
    if part == "tile":  # (latent, tile, tile, 3, 3); the fan-in is not the tile's
        return float(shape[0] ** -0.5)
    return 1.0 if len(shape) < 2 else float(shape[-1] ** -0.5)

"""A hypernetwork's values before training, each from its name, its shape and a seed.

Since a value depends on nothing else, hypernetworks for different layer types agree in what they have in common, and
whoever makes the values need not have the hypernetwork. All are such that weights are written at the scale of
`fedhet.hypernets.design.std_of`: E[z^2] = 1, so sum_l z_l D_l has the variance of D's entries times the width of z.
"""

import torch
from torch import Tensor

from fedhet.hypernets.design import std_of
from fedhet.randomness import torch_generator

PARTS = {
    "base": 2,
    "dense": 3,
    "left": 3,
    "basis": 3,
    "right": 3,
    "bias": 1,
    "change": 3,
    "vector": 2,
}
"""Axes that a part of a head has at least."""

GROUPS = ("embedding", "latents", "tiles")
"""Where its other parameters are."""

BASE = 4.0
"""Factor of a base weight: a step moves a weight about |z|^2 = 16 times as far through the dense head, and so here."""


def start(key: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A parameter of a `GraphHypernetwork` before training.

    Args:
        key: its name; of a head `heads.<type>.<role>.<part>`, of what heads are given `latents.<part>.<type>`.
        shape: its shape.
        seed: of the run.

    Raises:
        ValueError: a hypernetwork has no such parameter.
    """
    _check(key, shape)
    parts, generator = key.split("."), torch_generator(seed, "hypernetwork", key)
    if key.startswith("embedding.steps"):
        # PyTorch's own: messages are faint at first, so layers of one type begin alike and training tells them apart.
        return torch.empty(shape).uniform_(-(shape[-1] ** -0.5), shape[-1] ** -0.5, generator=generator)
    if parts[0] == "heads":
        std = _of_head(parts[1], parts[-1], shape)
    else:
        std = _elsewhere(parts[1 if parts[0] == "latents" else -1], shape)
    value = torch.zeros(shape)
    if std:
        value.normal_(std=std, generator=generator)
    return value


def _check(key: str, shape: tuple[int, ...]) -> None:
    parts = key.split(".")
    if parts[0] == "heads" and len(parts) == 4:
        least = PARTS.get(parts[-1])
    else:
        least = 1 if parts[0] in GROUPS and len(parts) > 1 else None
    if least is None or len(shape) < least or not all(shape):
        raise ValueError(f"a hypernetwork has no parameter {key[:100]} of shape {list(shape)}")


def _of_head(type: str, part: str, shape: tuple[int, ...]) -> float:
    if part == "base":  # (units, fan-in axes)
        return std_of(type, shape) / BASE
    if part == "dense":  # (latent, units, fan-in axes)
        return std_of(type, shape[1:]) / shape[0] ** 0.5
    if part == "left":  # (latent, units, rank)
        return float((shape[0] * shape[2]) ** -0.5)
    if part == "basis":  # the same with |U U^T| = O(1), so that a step of V moves W as far as one of the base does
        return float((shape[0] * max(shape[1:])) ** -0.5)
    if part == "right":  # (latent, rank, fan-in)
        return std_of(type, shape[1:]) / shape[0] ** 0.5
    return 0.0  # `bias`, (units, fan-in axes); `change`, (latent, rank, fan-in); `vector`, (latent, units)


def _elsewhere(part: str, shape: tuple[int, ...]) -> float:
    if part in ("factor", "vectors") or "bias" in part:
        return 0.0
    if part == "tile":  # (latent, tile, tile, 3, 3); the fan-in is not the tile's
        return float(shape[0] ** -0.5)
    return 1.0 if len(shape) < 2 else float(shape[-1] ** -0.5)

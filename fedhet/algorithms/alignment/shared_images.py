"""FedHARM's alignment on shared images: the target that clients are aligned with, and the distance to it.

There are three kinds of alignment: `cosine` compares descriptors (Kastellos et al., 2024), `cka` compares outputs of
blocks with the clients' mean kernel, and `spectral` compares Phi with the clusters of the clients' class posteriors.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from fedhet.algorithms.alignment.cka import debiased_linear_cka
from fedhet.algorithms.alignment.descriptors import cosine, mean_descriptor
from fedhet.algorithms.alignment.packing import check_received_features
from fedhet.algorithms.alignment.spectral import check_posteriors, cluster_rows
from fedhet.algorithms.alignment.targets import mean_target

Kind = Literal["cosine", "cka", "spectral"]
Distance = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
"""Distance, a scalar, between a client's values of a batch and the target's values of the same images, part by part."""

LEAST_ROWS = 4
"""Least number of images for an estimate of CKA; the distance of a smaller batch is 0."""


def target_of(kind: Kind, clients: Sequence[Sequence[Tensor]], *, generator: torch.Generator) -> list[Tensor]:
    """Return the target: mean descriptors, factors of the mean of unit kernels, or the spectral target.

    Args:
        kind: the kind of alignment.
        clients: for each client the values of the same n images: (n, width) for each block, or posteriors (n, C).
        generator: draws what the number of clusters is compared with.
    """
    blocks = zip(*clients, strict=True)
    if kind == "spectral":
        return [cluster_rows(sent, generator=generator) for sent in blocks]
    if kind == "cka":
        return [mean_target(block, unit=True) for block in blocks]
    return list(mean_descriptor(clients))


def distance_of(kind: Kind) -> Distance:
    """Return the distance of a kind: 1 - cosine, averaged over images, or 1 - CKA, averaged over parts."""
    if kind == "cosine":
        return lambda parts, target: 1 - cosine(parts, target).mean()

    def distance(parts: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        if len(parts[0]) < LEAST_ROWS:
            return parts[0].new_zeros(())
        return torch.stack([1 - debiased_linear_cka(*pair) for pair in zip(parts, target, strict=True)]).mean()

    return distance


def check_sent(kind: Kind, parts: Sequence[Tensor], images: int, widths: Sequence[int]) -> None:
    """Raise a ValueError unless a client's parts describe all images and have these widths, or are posteriors."""
    for number, part in enumerate(parts):
        check_received_features(part, f"part {number}")
        expected = (images, widths[number] if kind == "cosine" else part.shape[1])
        if tuple(part.shape) != expected:
            raise ValueError(f"part {number} has shape {tuple(part.shape)}, expected {expected}")
    if kind == "spectral":
        check_posteriors(parts[0])

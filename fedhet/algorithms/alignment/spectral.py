r"""The spectral target: how a federation as a whole clusters unlabelled public examples. It is fedhet's own.

Each client tells the class posteriors P_i `(L, C_i)` of the same L examples, of its own head and its own classes.
Centred and side by side they are one soft co-association of the examples (Fred and Jain, 2005; Strehl and Ghosh, 2002:
cluster ensembles), and the k leading left singular vectors U of it say which examples the clients keep apart. As in
spectral clustering (Ng, Jordan and Weiss, 2001) all k weigh alike and rows are scaled to length one: Z. A client is
aligned with the kernel Z Z^T of similarities. No label space is common, since left singular vectors do not know
columns. The nearest relative in federated learning is FLESD (Shi et al., 2021).
"""

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from fedhet.algorithms.alignment.cka import centred
from fedhet.algorithms.alignment.packing import check_finite_features
from fedhet.algorithms.alignment.targets import check_peers, spectrum

_LEAST = 1e-6
"""Eigenvalues under this share of the largest are the rounding of posteriors that travelled in float16."""


def check_posteriors(values: Tensor) -> None:
    """Raise a ValueError unless values `(L, C)` are posteriors: not negative, rows that add up to 1 in float16."""
    check_finite_features(values, "posteriors")
    if bool((values < 0).any()) or bool((values.sum(1) - 1).abs().max() > 0.01):
        raise ValueError("posteriors must not be negative, and each row must add up to 1")


def cluster_rows(sent: Sequence[Tensor], *, generator: torch.Generator) -> Tensor:
    """Return Z: the examples in the k leading left singular vectors of all posteriors, with rows of length one.

    Posteriors are `(L, C_i)` on the same L examples, else a ValueError is raised. The result is `(L, k)`; an example
    equal to the mean has a row of zeros, and if all posteriors are constant, Z is one column of zeros.
    """
    check_peers(sent)
    parts = [centred(posteriors.double()) * (1 / len(sent)) ** 0.5 for posteriors in sent]
    eigenvalues, vectors = spectrum(torch.cat(parts, 1))
    if not len(eigenvalues):
        return torch.zeros_like(sent[0][:, :1])
    rows = vectors[:, : count_clusters(eigenvalues, parts, generator)]
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return torch.where(lengths > 1e-9, rows / lengths.clamp_min(1e-9), 0.0).to(sent[0].dtype)


def count_clusters(eigenvalues: Tensor, parts: Sequence[Tensor], generator: torch.Generator) -> int:
    """Return k: the number of directions on which clients agree more than by chance, at least their classes.

    Parallel analysis (Horn, 1965) counts the singular values above the largest one of the same posteriors with each
    client's rows shuffled. This number is small early in training, so k is at least the median of C_i. It is at most
    half of the number of singular values: with all of them an example would resemble only itself. For a single client
    all count. `parts` are the centred posteriors, each `(L, C_i)`, whose kernel has these eigenvalues.
    """
    rank = int((eigenvalues > _LEAST * eigenvalues[:1]).sum())
    if len(parts) == 1:
        return max(rank, 1)
    # An order for drawing that does not depend on the order of the clients.
    ordered = sorted(parts, key=lambda part: float(torch.linalg.vector_norm(part)))
    shuffled = [part[torch.randperm(len(part), generator=generator)] for part in ordered]
    by_chance, _ = spectrum(torch.cat(shuffled, 1))
    agreed = int((eigenvalues > by_chance[:1]).sum())
    classes = int(statistics.median(part.shape[1] for part in parts))
    return max(min(max(agreed, classes), rank // 2), 1)

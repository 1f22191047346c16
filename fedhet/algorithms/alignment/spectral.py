"""The spectral target, fedhet's own: how all clients together cluster unlabelled public examples.

Each client sends the class posteriors P_i `(L, C_i)` of the same L examples, over its own classes. Centred and
concatenated they are a soft co-association of the examples, as in cluster ensembles (Strehl and Ghosh, 2002; Fred and
Jain, 2005). Its k leading left singular vectors U show which examples the clients distinguish. As in spectral
clustering (Ng, Jordan and Weiss, 2001), all k have equal weight, and rows are scaled to length one: Z. A client is
aligned with the kernel Z Z^T. Clients need no common label space, since U does not depend on the order of columns.
"""

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from fedhet.algorithms.alignment.cka import centred
from fedhet.algorithms.alignment.packing import check_finite_features
from fedhet.algorithms.alignment.targets import check_peers, spectrum

_LEAST = 1e-6
"""Smaller eigenvalues, relative to the largest, are rounding errors of posteriors sent in float16."""


def check_posteriors(values: Tensor) -> None:
    """Raise a ValueError unless values `(L, C)` are posteriors: not negative, with rows that sum to 1 in float16."""
    check_finite_features(values, "posteriors")
    if bool((values < 0).any()) or bool((values.sum(1) - 1).abs().max() > 0.01):
        raise ValueError("posteriors must not be negative, and each row must add up to 1")


def cluster_rows(sent: Sequence[Tensor], *, generator: torch.Generator) -> Tensor:
    """Return Z `(L, k)`: the k leading left singular vectors of all posteriors, with rows of length one.

    Posteriors are `(L, C_i)` on the same L examples, else a ValueError is raised. An example equal to the mean has a
    row of zeros. If all posteriors are constant, Z is one column of zeros.
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
    """Return k, the number of directions on which clients agree more than by chance.

    Parallel analysis (Horn, 1965) counts the singular values above the largest one of the same posteriors with each
    client's rows shuffled. This number is small early in training, so k is at least the median of C_i. It is at most
    half of the number of singular values: with all of them an example would resemble only itself. With a single client
    all are used. `parts` are the centred posteriors `(L, C_i)`, whose kernel has these eigenvalues.
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

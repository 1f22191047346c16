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

from fedhet.representations.cka import centred
from fedhet.representations.packing import check_finite_features
from fedhet.representations.targets import check_peers, spectrum

_LEAST = 1e-6
"""Eigenvalues under this share of the largest are the rounding of posteriors that travelled in float16."""


def check_posteriors(values: Tensor) -> None:
    """Raise a ValueError unless values `(L, C)` are posteriors: not negative, rows that add up to 1 in float16."""
    check_finite_features(values, "posteriors")
    if bool((values < 0).any()) or bool((values.sum(1) - 1).abs().max() > 0.01):
        raise ValueError("posteriors must not be negative, and each row must add up to 1")


def cluster_rows(sent: Sequence[Tensor], *, generator: torch.Generator) -> Tensor:
    """Z: the examples in the k leading left singular vectors of all posteriors, each row of length one.

    Posteriors are `(L, C_i)` on the same L examples, else a ValueError; the result is `(L, k)`, with a row of zeros for
    an example that is the mean of all; one column of zeros where nobody tells examples apart.
    """
    check_peers(sent)
    parts = [centred(own.double()) * (1 / len(sent)) ** 0.5 for own in sent]
    eigenvalues, vectors = spectrum(torch.cat(parts, 1))
    if not len(eigenvalues):
        return torch.zeros_like(sent[0][:, :1])
    rows = vectors[:, : count_clusters(eigenvalues, parts, generator)]
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return torch.where(lengths > 1e-9, rows / lengths.clamp_min(1e-9), 0.0).to(sent[0].dtype)


def count_clusters(eigenvalues: Tensor, parts: Sequence[Tensor], generator: torch.Generator) -> int:
    """k: as many directions as clients agree on more than chance, but no fewer than a client has classes.

    The number is that of parallel analysis (Horn, 1965): singular values above the largest one of the same posteriors
    with each client's rows shuffled. It is small as long as clients know little, so the median of C_i is the least. At
    most half of the singular values count: with all of them an example would be alike to itself only. Of a client
    alone all count. `parts` are the centred posteriors, each `(L, C_i)`, whose kernel has these eigenvalues.
    """
    found = int((eigenvalues > _LEAST * eigenvalues[:1]).sum())
    if len(parts) == 1:
        return max(found, 1)
    # Whoever comes first draws first: an order that is not that of the clients.
    ordered = sorted(parts, key=lambda part: float(torch.linalg.vector_norm(part)))
    shuffled = [part[torch.randperm(len(part), generator=generator)] for part in ordered]
    by_chance, _ = spectrum(torch.cat(shuffled, 1))
    agreed = int((eigenvalues > by_chance[:1]).sum())
    classes = int(statistics.median(part.shape[1] for part in parts))
    return max(min(max(agreed, classes), found // 2), 1)

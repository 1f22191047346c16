r"""The peers' mean kernel as FedHeNN's clients receive it: a low-rank factor.

For the linear kernel K-bar = 1/n sum_j K_j = B B^T with B = 1/sqrt(n) [A_1, A_2, ...] of the n peers' centred
features: no L x L matrix is needed. B is rotated to the eigenvectors of its kernel and cut to the smallest rank whose
kernel differs from K-bar by at most `ERROR`, relative to its Frobenius norm. Features whose rank is not smaller than
their width are sent whole.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedhet.algorithms.alignment.cka import centred, centred_kernel, rbf_kernel, self_inner
from fedhet.algorithms.alignment.packing import check_finite_features

ERROR = 0.01
"""Relative error of a kernel that compression may cause; 0: features travel whole."""


def compress(features: Tensor) -> Tensor:
    """Return the smallest factor (L, r) of the kernel of features (L, d) with a relative error of at most `ERROR`.

    Raises a ValueError unless features are finite.
    """
    check_finite_features(features, "features")
    values = centred(features)
    if ERROR == 0:
        return values
    weights, vectors = spectrum(values.double())
    if len(weights) == 0:
        return values[:, :1]
    tails = weights.square().flip(0).cumsum(0).flip(0).sqrt()  # the norm of what is cut at each rank from 0
    rank = max(1, int((tails > ERROR * tails[0]).sum()))
    if rank >= features.shape[1]:
        return values
    return (vectors[:, :rank] * weights[:rank].sqrt()).to(features.dtype)


def spectrum(values: Tensor) -> tuple[Tensor, Tensor]:
    """Positive eigenvalues `(w,)`, largest first, and eigenvectors `(L, w)` of the kernel of values `(L, d)`."""
    narrow = values.shape[1] <= len(values)
    weights, vectors = torch.linalg.eigh(values.T @ values if narrow else values @ values.T)
    weights, vectors = weights.flip(0), vectors.flip(1)
    positive = weights > weights[0] * len(weights) * torch.finfo(weights.dtype).eps
    weights, vectors = weights[positive], vectors[:, positive]
    return weights, (values @ vectors) * weights.rsqrt() if narrow else vectors


def mean_target(features: Sequence[Tensor], *, unit: bool = False) -> Tensor:
    """Return a factor (L, r) of the mean of the peers' kernels (FedHeNN, algorithm 1, uniform weights), compressed.

    Features are (L, d_j) on the same L examples, else a ValueError. With `unit` each kernel is divided by its norm, so
    that none dominates.
    """
    check_peers(features)
    peers = [centred(peer) for peer in features]
    if unit:
        peers = [peer / self_inner(peer).pow(0.25).clamp_min(torch.finfo(peer.dtype).tiny) for peer in peers]
    return compress(torch.cat([(1 / len(peers)) ** 0.5 * peer for peer in peers], 1))


def blocks(rows: int, block: int) -> list[slice]:
    """Consecutive row ranges, as few and as equal as hold at most `block` rows each; one range if `block` is 0."""
    if block <= 0 or block >= rows:
        return [slice(0, rows)]
    parts = torch.arange(rows).tensor_split(-(-rows // block))
    return [slice(int(part[0]), int(part[-1]) + 1) for part in parts]


def mean_rbf_blocks(features: Sequence[Tensor], block: int) -> list[Tensor]:
    """The diagonal blocks of the peers' mean RBF kernel, which is all that mini-batches of consecutive rows use.

    One double-centred kernel `(b, b)` for each of `blocks(L, block)`, of features `(L, d_j)` on the same L examples.
    """
    check_peers(features)
    weight = 1 / len(features)
    return [
        torch.stack([weight * centred_kernel(rbf_kernel(peer[rows])) for peer in features]).sum(0)
        for rows in blocks(len(features[0]), block)
    ]


def check_peers(features: Sequence[Tensor]) -> None:
    """Raise a ValueError unless there are peers, and all are finite and describe the same examples."""
    if not features:
        raise ValueError("there must be one peer or more")
    for index, peer in enumerate(features):
        check_finite_features(peer, f"features of peer {index}")
        if len(peer) != len(features[0]):
            raise ValueError(
                f"peers must describe the same examples: peer {index} has {len(peer)}, not {len(features[0])}"
            )

r"""The peers' mean kernel as FedHeNN's clients receive it: in feature space, no larger than its gradient needs.

For the linear kernel K-bar = 1/n sum_j K_j = B B^T with B = 1/sqrt(n) [A_1, A_2, ...] of the n peers' centred
features: no L x L matrix is needed. B is rotated to the eigenvectors of its kernel, K-bar = sum_i l_i u_i u_i^T, and
cut to the rank whose gradient is nearly as good.

**The rank.** Let k = l / ||l||, G = X X^T, g_i = u_i^T G u_i / ||G|| and c = CKA(G, K) = sum_i k_i g_i. The gradient
of 1 - CKA with respect to X is -2/||G|| (K/||K|| - c G/||G||) X. With the first r eigenvectors k becomes k^r = k[:r]
/ ||k[:r]||, c becomes c_r, and the gradient changes by -2/||G|| (sum_i (k_i - k^r_i) u_i u_i^T - (c - c_r) G/||G||)
X. Both norms follow from |u_i^T X|^2 and u_i^T X (u_i^T G X)^T, so the relative error at X is known for every rank at
once. It is evaluated at each peer's features for the mean of several peers; for one client's features at unrelated
ones (u_i^T X equally large for all i, c = 0), where it is ||k - k^r||. It is an estimate and no bound.

**The bytes.** The weakest columns travel in one byte an entry; how many follows from the variance of that rounding.
Half of the permitted error goes to the rank, a quarter to the bytes; the rest is left for float16 and for receivers
other than those evaluated. Features whose rank would not save bytes are sent whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhet.representations.cka import centred, centred_kernel, rbf_kernel, self_inner
from fedhet.representations.packing import Factor, check_finite_features, column_steps

_LEAST_GRADIENT = 0.01
"""Gradients under this share of the terms whose difference they are count as it: aligned clients have none left."""


@dataclass(frozen=True)
class _Probe:
    """Features X in the eigenvectors u_i of the kernel, as far as the gradient at X depends on them."""

    squares: Tensor  # |u_i^T X|^2, (w,)
    mixed: Tensor  # u_i^T X . u_i^T G X / ||G||, (w,)
    pull: float  # |G X / ||G|| |^2
    norm: float  # ||G||
    level: float  # mean square of a row of X


def compress(features: Tensor, *, error: float = 0.002, probes: Sequence[Tensor] = ()) -> Factor:
    """The smallest factor `(L, r)` of the kernel of features `(L, d)` that keeps the gradient of 1 - CKA.

    Its relative error is to be `error`, 0 for features as they are, at the probes `(L, d_j)`, or without any at
    features unrelated to the kernel. Raises a ValueError unless features and probes are finite.
    """
    check_finite_features(features, "features")
    values = centred(features)
    if error == 0:
        return Factor(values)
    weights, vectors = spectrum(values.double())
    if len(weights) == 0:
        return Factor(values[:, :1])
    shares = weights / torch.linalg.vector_norm(weights)
    evaluated = [_probe(vectors, probe) for probe in probes] or [_unrelated(shares)]
    errors = torch.stack([_rank_errors(shares, probe) for probe in evaluated]).amax(0)
    # From the end, so that every larger rank is good enough as well.
    sufficient = errors.flip(0).cummax(0).values.flip(0) <= error / 2
    rank = min(int((~sufficient).sum()) + 1, len(weights))
    if rank >= features.shape[1]:
        return Factor(values)
    columns = vectors[:, :rank] * weights[:rank].sqrt()
    noise = torch.stack([_rounding_errors(columns, shares, probe) for probe in evaluated]).amax(0)
    coarse = int((noise <= error / 4).sum())
    return Factor(columns.to(features.dtype), coarse, float(errors[rank - 1]))


def spectrum(values: Tensor) -> tuple[Tensor, Tensor]:
    """Positive eigenvalues `(w,)`, largest first, and eigenvectors `(L, w)` of the kernel of values `(L, d)`."""
    narrow = values.shape[1] <= len(values)
    weights, vectors = torch.linalg.eigh(values.T @ values if narrow else values @ values.T)
    weights, vectors = weights.flip(0), vectors.flip(1)
    positive = weights > weights[0] * len(weights) * torch.finfo(weights.dtype).eps
    weights, vectors = weights[positive], vectors[:, positive]
    return weights, (values @ vectors) * weights.rsqrt() if narrow else vectors


def _probe(vectors: Tensor, features: Tensor) -> _Probe:
    check_finite_features(features, "probe")
    x = centred(features.double())
    x = x / torch.linalg.vector_norm(x).clamp_min(torch.finfo(x.dtype).tiny)
    norm = self_inner(x).sqrt().clamp_min(torch.finfo(x.dtype).tiny)
    pulled = x @ (x.T @ x) / norm if x.shape[1] <= len(x) else (x @ x.T) @ x / norm
    along, along_pulled = vectors.T @ x, vectors.T @ pulled
    return _Probe(
        along.square().sum(1),
        (along * along_pulled).sum(1),
        float(pulled.square().sum()),
        float(norm),
        float(x.square().sum()) / len(x),
    )


def _unrelated(shares: Tensor) -> _Probe:
    """Features that lie equally in all directions, so many that their kernel has nothing in common with any other."""
    return _Probe(torch.ones_like(shares), torch.zeros_like(shares), 0.0, float("inf"), 1.0)


def _gradient_square(shares: Tensor, probe: _Probe) -> float:
    """The squared norm of (K/||K|| - c G/||G||) X, but not under the least share of that of its first term."""
    similarity = (shares * probe.squares).sum() / probe.norm
    direct = (shares.square() * probe.squares).sum()
    gradient = direct - 2 * similarity * (shares * probe.mixed).sum() + similarity**2 * probe.pull
    return max(float(gradient), _LEAST_GRADIENT**2 * float(direct), float(torch.finfo(shares.dtype).tiny))


def _rank_errors(shares: Tensor, probe: _Probe) -> Tensor:
    """The relative error of the gradient at a probe for the ranks 1 to w, `(w,)`."""
    scale = shares.square().cumsum(0).rsqrt()
    kept = 1 - scale
    squares = shares.square() * probe.squares
    mixed = shares * probe.mixed
    similarities = (shares * probe.squares).cumsum(0) / probe.norm
    change = similarities[-1] - scale * similarities
    direct = kept.square() * squares.cumsum(0) + _tails(squares)
    error = direct - 2 * change * (kept * mixed.cumsum(0) + _tails(mixed)) + change.square() * probe.pull
    return (error.clamp_min(0) / _gradient_square(shares, probe)).sqrt()


def _tails(values: Tensor) -> Tensor:
    """The sums of what follows each entry, added up from the small end."""
    return values.flip(0).cumsum(0).flip(0) - values


def _rounding_errors(columns: Tensor, shares: Tensor, probe: _Probe) -> Tensor:
    """The relative error of the gradient at a probe if the columns from each on were rounded to one byte, `(r,)`.

    Noise n_i of variance step^2 / 12 in b_i = sqrt(l_i) u_i changes K X by n_i b_i^T X + b_i n_i^T X, whose expected
    square is l_i |n_i|^2 (|u_i^T X|^2 + ||X||^2 / L).
    """
    noise = column_steps(columns).square() / 12 * len(columns)
    relative = noise / columns.square().sum(0)
    rank = columns.shape[1]
    squares = shares[:rank].square() * relative * (probe.squares[:rank] + probe.level)
    return (squares.flip(0).cumsum(0).flip(0) / _gradient_square(shares, probe)).sqrt()


def mean_target(features: Sequence[Tensor], *, unit: bool = False, error: float = 0.002) -> Factor:
    """A factor `(L, r)` of the mean of the peers' kernels K_j = H A_j A_j^T H (FedHeNN, algorithm 1, uniform weights).

    Features are `(L, d_j)` on the same L examples, else a ValueError; with `unit` each K_j is divided by its norm, so
    that none dominates; `error` as in `compress`.
    """
    check_peers(features)
    peers = [centred(peer) for peer in features]
    if unit:
        peers = [peer / self_inner(peer).pow(0.25).clamp_min(torch.finfo(peer.dtype).tiny) for peer in peers]
    stacked = torch.cat([(1 / len(peers)) ** 0.5 * peer for peer in peers], 1)
    # At the only peer's own features the gradient is 0: they say nothing about anybody else's.
    return compress(stacked, error=error, probes=peers if len(peers) > 1 else ())


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

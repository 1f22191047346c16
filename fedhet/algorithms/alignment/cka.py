"""Similarity of two representations of the same examples: CKA, Procrustes, InfoNCE, and FedHeNN's distance.

Representations are features `(L, d1)` and `(L, d2)` of L examples. CKA and Procrustes centre the features and divide
them by their norm, which prevents an overflow. They are differentiable: autograd treats the norm as a constant, but
gradients are exact, because the measures do not depend on scale.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_DEBIASED = 1e-3
# Lower bound of a debiased self-similarity, as a fraction of the biased one. Smaller values are rounding or chance and
# would give enormous gradients to single examples.


def check_features(x: Tensor, name: str = "features") -> Tensor:
    """Return features `x` (L, d); raise a ValueError about `name` unless they are floats with L >= 2 and d >= 1."""
    if x.ndim != 2 or not x.is_floating_point() or x.shape[0] < 2 or x.shape[1] < 1:
        raise ValueError(
            f"{name!r} must be floats (examples >= 2, width >= 1), not {x.dtype} of shape {tuple(x.shape)}"
        )
    return x


def check_pair(x: Tensor, y: Tensor) -> None:
    """Check that features `x` (L, d1) and `y` (L, d2) are floats with equal L >= 2; raise a ValueError otherwise."""
    check_features(x, "x")
    check_features(y, "y")
    if len(x) != len(y):
        raise ValueError(f"got features of {len(x)} and {len(y)} examples: compute both from the same examples")


def linear_cka(x: Tensor, y: Tensor) -> Tensor:
    """Return CKA of features `x` (L, d1) and `y` (L, d2) with linear kernels (Kornblith et al., ICML 2019).

        CKA(X, Y) = ||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F),    X and Y centred

    The result is a scalar in [0, 1], and 0 if `x` or `y` is constant (FedHeNN, Makhija et al., ICML 2022, equation 4).

        >>> x = torch.randn(100, 8)
        >>> round(linear_cka(x, 3 * x).item(), 4)
        1.0
    """
    check_pair(x, y)
    x, y = centred_unit(x), centred_unit(y)
    return ratio(inner(x, y), self_inner(x), self_inner(y))


def debiased_linear_cka(x: Tensor, y: Tensor) -> Tensor:
    """Return CKA of features `x` (L, d1) and `y` (L, d2) with linear kernels, estimated from L >= 4 examples.

    The estimate uses the debiased HSIC_1 (Song et al., JMLR 2012). Its mean over mini-batches estimates CKA of all
    examples. It is a scalar of at most 1, can be negative, and is 0 if `x` or `y` is constant.
    """
    check_pair(x, y)
    if (n := len(x)) < 4:
        raise ValueError(f"debiased CKA needs at least 4 examples, got {n}: use larger mini-batches")
    x, y = centred_unit(x), centred_unit(y)
    x_diagonal, y_diagonal = x.square().sum(1), y.square().sum(1)

    def debiased(total: Tensor, p: Tensor, q: Tensor) -> Tensor:
        # Rows of centred Gram matrices sum to 0, so HSIC_1 depends on their diagonals p and q only.
        return total - n / (n - 2) * (p @ q) + p.sum() * q.sum() / ((n - 1) * (n - 2))

    x_total, y_total = self_inner(x), self_inner(y)
    return ratio(
        debiased(inner(x, y), x_diagonal, y_diagonal),
        torch.maximum(debiased(x_total, x_diagonal, x_diagonal), _LEAST_DEBIASED * x_total),
        torch.maximum(debiased(y_total, y_diagonal, y_diagonal), _LEAST_DEBIASED * y_total),
    )


def rbf_cka(x: Tensor, y: Tensor, threshold: float = 0.5, *, debiased: bool = False) -> Tensor:
    """Return CKA, a scalar, of features `x` (L, d1) and `y` (L, d2) with Gaussian kernels.

    `threshold` determines the kernels' bandwidth (see `rbf_kernel`); with `debiased`, HSIC is estimated without bias.
    """
    check_pair(x, y)
    return kernel_cka(rbf_kernel(x, threshold), rbf_kernel(y, threshold), debiased=debiased)


def procrustes_distance(x: Tensor, y: Tensor) -> Tensor:
    """Return the orthogonal Procrustes distance, in [0, 2], of features `x` and `y` (L, d) (Ding et al., NeurIPS 2021).

        d(X, Y) = min_Q ||X - Y Q||_F^2 = 2 - 2 ||X^T Y||_*,    X and Y centred and of norm 1

    The subgradient of least norm is used where the distance is not differentiable (singular values of 0).
    """
    check_pair(x, y)
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x has {x.shape[1]} features and y {y.shape[1]}, but Procrustes needs equally many: use CKA")
    tiny = torch.finfo(x.dtype).tiny
    x, y = (features / torch.linalg.vector_norm(features).clamp_min(tiny) for features in (centred(x), centred(y)))
    product = x.T @ y
    with torch.no_grad():
        u, singular, v = torch.linalg.svd(product)
        kept = singular > singular[0] * len(singular) * torch.finfo(x.dtype).eps
        rotation = (u * kept) @ v
    # The nuclear norm is the largest <product, rotation>; its derivative through the maximiser is 0.
    nuclear: Tensor = (product * rotation).sum()
    return 2 - 2 * nuclear


def info_nce(features: Tensor, peers: Tensor, temperature: float = 0.2) -> Tensor:
    """Return the mean InfoNCE loss of `features` (n, d) against m peers' vectors `peers` (n, m d), a scalar.

    The positive of an example is the same example at the peer, and its negatives are the peer's other examples.
    """
    z = F.normalize(features.to(peers.dtype))
    peers = F.normalize(peers.unflatten(1, (-1, z.shape[1])), dim=2)
    similarities = torch.einsum("kd,lmd->kml", z, peers) / temperature
    return -similarities.log_softmax(2).diagonal(dim1=0, dim2=2).mean()


def centred(x: Tensor) -> Tensor:
    """Return features `(L, d)` minus the mean of each column."""
    return x - x.mean(0)


def centred_unit(x: Tensor) -> Tensor:
    """Return features `(L, d)`, centred and divided by their Frobenius norm, which autograd treats as a constant."""
    return _unit(centred(x), x)


def _unit(deviation: Tensor, original: Tensor) -> Tensor:
    """Return `deviation`, the centred `original`, divided by its norm, or zeros if `original` is constant."""
    with torch.no_grad():
        norm = torch.linalg.vector_norm(deviation)
        rounding = 8 * torch.finfo(deviation.dtype).eps * torch.linalg.vector_norm(original)
        scale = torch.where(norm > rounding, norm.reciprocal(), 0.0)
    return deviation * scale


def inner(x: Tensor, y: Tensor) -> Tensor:
    """Return the Frobenius inner product of the linear kernels `x x^T` and `y y^T` of features (L, d1) and (L, d2)."""
    if x.shape[1] * y.shape[1] <= len(x) * (x.shape[1] + y.shape[1]):
        return (x.T @ y).square().sum()
    return ((x @ x.T) * (y @ y.T)).sum()


def self_inner(x: Tensor) -> Tensor:
    """Return the squared Frobenius norm of the linear kernel `x x^T` of features `x` (L, d)."""
    return (x.T @ x if x.shape[1] <= len(x) else x @ x.T).square().sum()


def ratio(cross: Tensor, x_self: Tensor, y_self: Tensor) -> Tensor:
    """Return CKA, `cross / sqrt(x_self * y_self)`, from the inner product of two kernels and their squared norms."""
    least = torch.finfo(cross.dtype).eps
    return cross / (x_self.clamp_min(least).sqrt() * y_self.clamp_min(least).sqrt())


def rbf_kernel(x: Tensor, threshold: float = 0.5) -> Tensor:
    """Return the Gaussian kernel `(L, L)` of features `x` `(L, d)` (Kornblith et al., ICML 2019, section 3).

    Its bandwidth is `threshold` times the median distance over all L^2 pairs of rows, which autograd treats as a
    constant. If the median is 0, the root mean square distance replaces it.
    """
    if not threshold > 0:
        raise ValueError(f"threshold of the Gaussian kernel must be above 0, such as 0.5, got {threshold}")
    squares = squared_distances(check_features(x))
    with torch.no_grad():
        values = squares.flatten()
        count = squares.numel()
        # torch.median takes the lower of the middle two.
        middle = (values.kthvalue((count + 1) // 2).values + values.kthvalue(count // 2 + 1).values) / 2
        scale = torch.where(middle > 0, middle, squares.mean()).clamp_min(torch.finfo(x.dtype).tiny)
    return torch.exp(-squares / (2 * threshold**2 * scale))


def squared_distances(x: Tensor) -> Tensor:
    """Return the squared Euclidean distances `(L, L)` between the rows of features `x` `(L, d)`."""
    x = centred(x)
    gram = x @ x.T
    norms = gram.diagonal()
    return torch.clamp_min(norms[:, None] + norms[None, :] - 2 * gram, 0)


def centred_kernel(kernel: Tensor) -> Tensor:
    """Return `H K H` for a symmetric kernel K `(L, L)`, with the centring matrix H = I - 11^T / L."""
    means = kernel.mean(0)
    return kernel - means[:, None] - means[None, :] + means.mean()


def u_centred_kernel(kernel: Tensor) -> Tensor:
    """Return the U-centred kernel `(L, L)` (Székely and Rizzo, 2014), with a zero diagonal and rows that sum to 0."""
    n = len(kernel)
    kernel = kernel - torch.diag(kernel.diagonal())
    means = kernel.sum(0) / (n - 2)
    means = means - means.sum() / (2 * (n - 1))
    kernel = kernel - means[:, None] - means[None, :]
    return kernel - torch.diag(kernel.diagonal())


def kernel_cka(x_kernel: Tensor, y_kernel: Tensor, *, debiased: bool = False) -> Tensor:
    """Return CKA, a scalar, of two symmetric kernels `(L, L)`, which are centred or, if `debiased`, U-centred."""
    x, y = (_unit(centred_kernel(kernel), kernel) for kernel in (x_kernel, y_kernel))
    x_self, y_self = x.square().sum(), y.square().sum()
    if debiased:
        x, y = u_centred_kernel(x), u_centred_kernel(y)
        x_self = torch.maximum(x.square().sum(), _LEAST_DEBIASED * x_self)
        y_self = torch.maximum(y.square().sum(), _LEAST_DEBIASED * y_self)
    return ratio((x * y).sum(), x_self, y_self)


Kernel = Literal["linear", "rbf", "procrustes", "contrast"]
Distance = tuple[Kernel, bool]


def distance_to(features: Tensor, target: Tensor, *, kind: Distance) -> Tensor:
    """Return FedHeNN's distance, a scalar, between features `(b, d)` and the `target` `(b, r)` of the same b examples.

    The target has r features of each example, such as the global model's or the result of `mean_target`. `kind` is a
    pair: the kernel, and whether to use debiased CKA, which suits mini-batches. The distance is 1 - CKA (FedHeNN's
    equation 6) for a `"linear"` or `"rbf"` kernel, the Procrustes distance for `"procrustes"`, and for `"contrast"` the
    InfoNCE loss against peers, whose vectors the target has side by side.
    """
    kernel, debiased = kind
    # Phi may be computed in another dtype.
    features = features.to(target.dtype)
    if kernel == "contrast":
        return info_nce(features, target)
    if kernel == "procrustes":
        return procrustes_distance(features, target)
    if kernel == "rbf":
        return 1 - rbf_cka(features, target, debiased=debiased)
    return 1 - (debiased_linear_cka if debiased else linear_cka)(features, target)

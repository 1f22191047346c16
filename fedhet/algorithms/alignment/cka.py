"""Similarity of two representations of the same examples: CKA with linear and RBF kernels, Procrustes.

CKA follows Kornblith et al. (ICML 2019), its debiased estimate is HSIC_1 of Song et al. (JMLR 2012), the Procrustes
distance that of Ding et al. (NeurIPS 2021). All take features `(L, d1)` and `(L, d2)` whose rows are the same L
examples, centre them, are differentiable, and raise a ValueError if the shapes do not fit.

CKA does not change when features are scaled, so they are divided by their norm, which is held constant for autograd:
the gradient is exact and fourth powers of large features cannot overflow.
"""

import torch
from torch import Tensor

_LEAST_DEBIASED = 1e-3
"""A debiased self-similarity under this share of the biased one is rounding or chance; as a denominator it would give
enormous gradients to single examples."""


def check_features(x: Tensor, name: str = "features") -> Tensor:
    """Return `x`, or raise a ValueError unless it is a floating `(L, d)` tensor with at least two rows and a column."""
    if x.ndim != 2 or not x.is_floating_point() or x.shape[0] < 2 or x.shape[1] < 1:
        raise ValueError(
            f"{name} must be a floating tensor of shape (examples, width) with two examples or more, "
            f"got {x.dtype} of shape {tuple(x.shape)}"
        )
    return x


def check_pair(x: Tensor, y: Tensor) -> None:
    """Raise a ValueError unless `x` and `y` are floating `(L, d1)` and `(L, d2)` tensors."""
    check_features(x, "x")
    check_features(y, "y")
    if len(x) != len(y):
        raise ValueError(f"x and y must describe the same examples, got {len(x)} and {len(y)} rows")


def centred(x: Tensor) -> Tensor:
    """Features `(L, d)` with the mean of each column removed."""
    return x - x.mean(0)


def centred_unit(x: Tensor) -> Tensor:
    """Centred features `(L, d)` over their Frobenius norm, which autograd takes for a constant."""
    return _unit(centred(x), x)


def _unit(deviation: Tensor, original: Tensor) -> Tensor:
    """Normalise a deviation from the mean; return zero if it is only rounding error."""
    with torch.no_grad():
        norm = torch.linalg.vector_norm(deviation)
        rounding = 8 * torch.finfo(deviation.dtype).eps * torch.linalg.vector_norm(original)
        scale = torch.where(norm > rounding, norm.reciprocal(), 0.0)
    return deviation * scale


def inner(x: Tensor, y: Tensor) -> Tensor:
    """`<x x^T, y y^T>` (Frobenius), in feature space or of L x L Gram matrices, whichever takes less arithmetic."""
    if x.shape[1] * y.shape[1] <= len(x) * (x.shape[1] + y.shape[1]):
        return (x.T @ y).square().sum()
    return ((x @ x.T) * (y @ y.T)).sum()


def self_inner(x: Tensor) -> Tensor:
    """`||x x^T||_F^2`, through the smaller of `x^T x` and `x x^T`."""
    return (x.T @ x if x.shape[1] <= len(x) else x @ x.T).square().sum()


def linear_cka(x: Tensor, y: Tensor) -> Tensor:
    """CKA with linear kernels, `||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F)` on centred features.

    This is equation 4 of FedHeNN (Makhija et al., ICML 2022) with the centring that the paper leaves out in print: a
    scalar in [0, 1], 0 if either side is constant.
    """
    check_pair(x, y)
    x, y = centred_unit(x), centred_unit(y)
    return ratio(inner(x, y), self_inner(x), self_inner(y))


def debiased_linear_cka(x: Tensor, y: Tensor) -> Tensor:
    """CKA with linear kernels from debiased HSIC (Song et al. 2012), whose mean over mini-batches estimates the whole.

    A scalar, at most 1, which can be negative; 0 if either side is constant. It takes at least four rows, and is never
    NaN: denominators are clamped.
    """
    check_pair(x, y)
    if (n := len(x)) < 4:
        raise ValueError(f"a debiased estimate needs four examples or more, got {n}")
    x, y = centred_unit(x), centred_unit(y)
    x_diagonal, y_diagonal = x.square().sum(1), y.square().sum(1)

    def debiased(total: Tensor, p: Tensor, q: Tensor) -> Tensor:
        # Centred Gram matrices have zero row sums, so that HSIC_1 needs of them only their diagonals p and q.
        return total - n / (n - 2) * (p @ q) + p.sum() * q.sum() / ((n - 1) * (n - 2))

    x_total, y_total = self_inner(x), self_inner(y)
    return ratio(
        debiased(inner(x, y), x_diagonal, y_diagonal),
        torch.maximum(debiased(x_total, x_diagonal, x_diagonal), _LEAST_DEBIASED * x_total),
        torch.maximum(debiased(y_total, y_diagonal, y_diagonal), _LEAST_DEBIASED * y_total),
    )


def ratio(cross: Tensor, x_self: Tensor, y_self: Tensor) -> Tensor:
    """`cross / sqrt(x_self y_self)` for kernels of unit scale, each denominator clamped where only rounding is left."""
    least = torch.finfo(cross.dtype).eps
    return cross / (x_self.clamp_min(least).sqrt() * y_self.clamp_min(least).sqrt())


def squared_distances(x: Tensor) -> Tensor:
    """The squared Euclidean distances `(L, L)` between the rows of `x` `(L, d)`."""
    x = centred(x)
    gram = x @ x.T
    norms = gram.diagonal()
    return torch.clamp_min(norms[:, None] + norms[None, :] - 2 * gram, 0)


def rbf_kernel(x: Tensor, threshold: float = 0.5) -> Tensor:
    """The Gaussian kernel `(L, L)` with a bandwidth of `threshold` median distances between rows (Kornblith et al.).

    The median is over all L^2 pairs, a row with itself included, and is a constant for autograd. Where it is 0 (most
    rows coincide) the mean takes its place. A threshold that is not positive raises a ValueError.
    """
    if not threshold > 0:
        raise ValueError(f"threshold must be positive, got {threshold}")
    squares = squared_distances(check_features(x))
    with torch.no_grad():
        values, count = squares.flatten(), squares.numel()
        # torch.median takes the lower of the middle two.
        middle = (values.kthvalue((count + 1) // 2).values + values.kthvalue(count // 2 + 1).values) / 2
        scale = torch.where(middle > 0, middle, squares.mean()).clamp_min(torch.finfo(x.dtype).tiny)
    return torch.exp(-squares / (2 * threshold**2 * scale))


def centred_kernel(kernel: Tensor) -> Tensor:
    """`H K H` of a symmetric kernel `(L, L)`: every row and column sums to 0."""
    means = kernel.mean(0)
    return kernel - means[:, None] - means[None, :] + means.mean()


def u_centred_kernel(kernel: Tensor) -> Tensor:
    """The U-centred kernel `(L, L)` of debiased HSIC (Székely and Rizzo 2014): a zero diagonal, rows that sum to 0."""
    n = len(kernel)
    kernel = kernel - torch.diag(kernel.diagonal())
    means = kernel.sum(0) / (n - 2)
    means = means - means.sum() / (2 * (n - 1))
    kernel = kernel - means[:, None] - means[None, :]
    return kernel - torch.diag(kernel.diagonal())


def unit_kernel(kernel: Tensor, *, debiased: bool) -> tuple[Tensor, Tensor]:
    """A kernel `(L, L)` centred for CKA at unit scale, and its inner product with itself for the denominator."""
    biased = _unit(centred_kernel(kernel), kernel)
    square: Tensor = biased.square().sum()
    if not debiased:
        return biased, square
    unbiased = u_centred_kernel(biased)
    return unbiased, torch.maximum(unbiased.square().sum(), _LEAST_DEBIASED * square)


def kernel_cka(x_kernel: Tensor, y_kernel: Tensor, *, debiased: bool = False) -> Tensor:
    """CKA of two symmetric kernels `(L, L)`, `<HKH, HLH> / (||HKH|| ||HLH||)` (Kornblith et al., Eq. 4), a scalar."""
    x, x_self = unit_kernel(x_kernel, debiased=debiased)
    y, y_self = unit_kernel(y_kernel, debiased=debiased)
    return ratio((x * y).sum(), x_self, y_self)


def rbf_cka(x: Tensor, y: Tensor, threshold: float = 0.5) -> Tensor:
    """CKA with Gaussian kernels (see `rbf_kernel`), a scalar in [0, 1]."""
    check_pair(x, y)
    return kernel_cka(rbf_kernel(x, threshold), rbf_kernel(y, threshold))


def procrustes_distance(x: Tensor, y: Tensor) -> Tensor:
    """The orthogonal Procrustes distance `2 - 2 ||X^T Y||_*` of centred features of norm 1 (Ding et al. 2021).

    It is the squared distance after the best rotation of features of equal widths, a scalar in [0, 2]. The gradient is
    the subgradient of least norm, so that dead units, whose singular values are 0, are not moved at random.
    """
    check_pair(x, y)
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"the Procrustes distance needs equal widths, got {x.shape[1]} and {y.shape[1]}")
    tiny = torch.finfo(x.dtype).tiny
    x, y = (each / torch.linalg.vector_norm(each).clamp_min(tiny) for each in (centred(x), centred(y)))
    product = x.T @ y
    with torch.no_grad():
        u, singular, v = torch.linalg.svd(product)
        kept = singular > singular[0] * len(singular) * torch.finfo(x.dtype).eps
        rotation = (u * kept) @ v
    # The nuclear norm is the largest <product, rotation>; its derivative through the maximiser is 0.
    nuclear: Tensor = (product * rotation).sum()
    return 2 - 2 * nuclear

"""CKA, HSIC and the Procrustes distance against references and plain formulas; FedHeNN's term on mini-batches."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedhet.algorithms.alignment.cka import (
    Kernel,
    centred,
    debiased_linear_cka,
    distance_to,
    inner,
    kernel_cka,
    linear_cka,
    procrustes_distance,
    rbf_cka,
    rbf_kernel,
    squared_distances,
)
from fedhet.algorithms.alignment.targets import mean_target
from fedhet.models.representation import Representation

CASES = ["gauss_50x8_50x8", "relu_128x32_128x16", "small_n_8x32_8x16"]
SIMILARITIES = [linear_cka, debiased_linear_cka, rbf_cka]


def features(rows: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gaussian_kernel(x: Tensor, bandwidth: float | Tensor) -> Tensor:
    return torch.exp(-squared_distances(x) / (2 * bandwidth**2))


def rotation(width: int) -> Tensor:
    return torch.linalg.qr(features(width, width, seed=9)).Q


@pytest.fixture(scope="module")
def cases(reference: Path) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = json.loads((reference / "cka_cases.json").read_text())
    with np.load(reference / "cka_cases.npz") as arrays:
        for name, case in values.items():
            case |= {key: torch.from_numpy(arrays[f"{name}/{key}"]) for key in ("X", "Y", "grad_1_minus_cka_wrt_X")}
    return values


@pytest.mark.parametrize("name", CASES)
def test_reference_values(cases: dict[str, dict[str, Any]], name: str) -> None:
    case = cases[name]
    x, y = case["X"], case["Y"]
    k, l = x @ x.T, y @ y.T  # noqa: E741
    x_unit, y_unit = (a - a.mean(0) for a in (x, y))
    x_unit, y_unit = (a / (a @ a.T).norm().sqrt() for a in (x_unit, y_unit))
    computed = {
        "linear_cka_kornblith_gram": kernel_cka(k, l),
        "linear_cka_kornblith_feature": linear_cka(x, y),
        "linear_cka_textbook_double_centred": linear_cka(x, y),
        "linear_eq4_on_centred_features": linear_cka(x - x.mean(0), y - y.mean(0)),
        "linear_cka_debiased": debiased_linear_cka(x, y),
        "rbf_cka_median_thr0.2": rbf_cka(x, y, 0.2),
        "rbf_cka_median_thr0.5": rbf_cka(x, y),
        "rbf_cka_median_thr1.0": rbf_cka(x, y, threshold=1.0),
        "rbf_cka_sigma2_1.0": kernel_cka(gaussian_kernel(x, 1.0), gaussian_kernel(y, 1.0)),
        "rbf_cka_sigma2_4.0": kernel_cka(gaussian_kernel(x, 4.0), gaussian_kernel(y, 4.0)),
        "linear_cka_X_vs_mean_kernel": linear_cka(x, torch.cat([x, y], 1)),
        "linear_cka_X_vs_mean_of_fro_normalised_centred_kernels": linear_cka(x, torch.cat([x_unit, y_unit], 1)),
        "hsic_XX": inner(centred(x), centred(x)) / (len(x) - 1) ** 2,
        "hsic_XY": inner(centred(x), centred(y)) / (len(x) - 1) ** 2,
    }
    for key, value in computed.items():
        assert value.item() == pytest.approx(case[key], rel=1e-9, abs=1e-9), key
    assert kernel_cka(k, l, debiased=True).item() == pytest.approx(case["linear_cka_debiased"], abs=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_reference_gradient(cases: dict[str, dict[str, Any]], name: str) -> None:
    x = cases[name]["X"].requires_grad_()
    (gradient,) = torch.autograd.grad(1 - linear_cka(x, cases[name]["Y"]), x)
    torch.testing.assert_close(gradient, cases[name]["grad_1_minus_cka_wrt_X"], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("widths", [(3, 5), (40, 60)], ids=["narrow", "wide"])
def test_gradcheck(similarity: Any, widths: tuple[int, int]) -> None:
    x, y = features(9, widths[0]), features(9, widths[1], seed=1)
    if similarity is rbf_cka:
        # The bandwidth is a constant for autograd, so finite differences must hold it fixed as well.
        gap = torch.cdist(x, x).square().flatten().median().sqrt()
        assert torch.autograd.gradcheck(
            lambda a: kernel_cka(gaussian_kernel(a, gap), rbf_kernel(y)), x.requires_grad_()
        )
    else:
        assert torch.autograd.gradcheck(lambda a: similarity(a, y), x.requires_grad_())


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_invariances(similarity: Any) -> None:
    x, y = features(40, 6), features(40, 6, seed=1) + features(40, 6)
    before = similarity(x, y)
    torch.testing.assert_close(similarity(3.7 * x @ rotation(6) + 2, y), before)
    torch.testing.assert_close(similarity(x, 1e-3 * y @ rotation(6)), before)
    stretched = x @ torch.diag(torch.tensor([100.0, 1, 1, 1, 1, 1], dtype=x.dtype))
    assert abs(similarity(stretched, y) - before) > 0.02
    assert similarity(x, x).item() == pytest.approx(1)


def test_debiased_estimate_on_mini_batches() -> None:
    x = features(4000, 20)
    y = torch.cat([x[:, :10], features(4000, 30, seed=1)], 1)
    whole = linear_cka(x, y).item()
    batches = torch.randperm(4000, generator=torch.Generator().manual_seed(0)).view(-1, 32)
    biased = np.mean([linear_cka(x[rows], y[rows]).item() for rows in batches])
    debiased = np.mean([debiased_linear_cka(x[rows], y[rows]).item() for rows in batches])
    assert abs(debiased - whole) < 0.03 < 0.1 < abs(biased - whole)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize(("dtype", "constant"), [(torch.float32, 0.1), (torch.float64, 1e6)])
def test_constant_features(similarity: Any, dtype: torch.dtype, constant: float) -> None:
    x = torch.full((12, 5), constant, dtype=dtype, requires_grad=True)
    value = similarity(x, features(12, 3, dtype=dtype))
    (gradient,) = torch.autograd.grad(value, x)
    assert value.item() == pytest.approx(0, abs=1e-3)
    assert torch.count_nonzero(gradient) == 0


def test_procrustes_distance() -> None:
    x, y = features(30, 6), features(30, 6, seed=1)
    a, b = (z - z.mean(0) for z in (x, y))
    a, b = a / a.norm(), b / b.norm()
    expected = 2 - 2 * torch.linalg.matrix_norm(a.T @ b, "nuc")
    torch.testing.assert_close(procrustes_distance(x, y), expected)
    u, _, v = torch.linalg.svd(b.T @ a)
    torch.testing.assert_close((a - b @ u @ v).square().sum(), expected)
    torch.testing.assert_close(procrustes_distance(5 * x @ rotation(6) + 1, y), expected)
    assert procrustes_distance(x, x @ rotation(6)).item() == pytest.approx(0, abs=1e-12)
    assert torch.autograd.gradcheck(lambda z: procrustes_distance(z, y), x.requires_grad_())


def test_procrustes_gradient_with_equal_singular_values() -> None:
    x = torch.linalg.qr(features(30, 6) - features(30, 6).mean(0)).Q
    x[:, 4:] = 0
    x.requires_grad_()
    y = x.detach() @ rotation(6)
    y[:, 5] = 0
    (gradient,) = torch.autograd.grad(procrustes_distance(x, y), x)
    assert gradient.isfinite().all()
    dead = torch.zeros(30, 6, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(procrustes_distance(dead, y), dead)
    assert torch.count_nonzero(gradient) == 0


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_mini_batches_estimate_the_gradient(kernel: Kernel) -> None:
    rad = features(1024, 10)
    target = mean_target([(rad @ features(10, width, seed)).relu() for seed, width in ((1, 16), (2, 24), (3, 40))])
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    representation = Representation(model)

    def gradient(rows: Tensor) -> Tensor:
        loss = distance_to(representation(rad[rows]), target[rows], kind=(kernel, len(rows) < 1024))
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        return torch.cat([each.flatten() for each in found if each is not None])

    expected = gradient(torch.arange(1024))
    mean = torch.stack([gradient(torch.randperm(1024)[:128]) for _ in range(60)]).mean(0)
    assert (mean - expected).norm() < 0.15 * expected.norm()


def test_distances() -> None:
    target, x = features(60, 6), features(60, 6, seed=1) + features(60, 6)
    for kernel, debiased, expected in (
        ("linear", False, 1 - linear_cka(x, target)),
        ("linear", True, 1 - debiased_linear_cka(x, target)),
        ("procrustes", False, procrustes_distance(x, target)),
        ("rbf", False, 1 - rbf_cka(x, target)),
        ("rbf", True, 1 - kernel_cka(rbf_kernel(x), rbf_kernel(target), debiased=True)),
    ):
        torch.testing.assert_close(distance_to(x, target, kind=(kernel, debiased)), expected)

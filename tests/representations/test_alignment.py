"""The proximal term: its gradient against the paper's equation, its mini-batches against the whole."""

import pytest
import torch
from torch import Tensor, nn

from fedhet.algorithms.alignment.cka import (
    Alignment,
    Kernel,
    debiased_linear_cka,
    kernel_cka,
    linear_cka,
    procrustes_distance,
    rbf_kernel,
)
from fedhet.algorithms.alignment.targets import mean_target
from fedhet.models.representation import Representation


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def peers(rad: Tensor, widths: list[int]) -> list[Tensor]:
    return [(rad @ normal(rad.shape[1], width, seed=i + 1)).relu() for i, width in enumerate(widths)]


def network(width: int = 16) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 3)).double()


def gradients(loss: Tensor, model: nn.Module) -> Tensor:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_mini_batches_estimate_the_gradient(kernel: Kernel) -> None:
    rad = normal(1024, 10)
    features = peers(rad, [16, 24, 40])
    model = network()
    representation = Representation(model)
    target = mean_target(features)
    whole = Alignment(kernel, target, batch=0, generator=generator())
    batches = Alignment(kernel, target, batch=128, generator=generator())

    def gradient(alignment: Alignment) -> Tensor:
        rows = alignment.rows()
        return gradients(alignment.distance(representation(rad[rows]), rows), model)

    expected = gradient(whole)
    mean = torch.stack([gradient(batches) for _ in range(60)]).mean(0)
    assert (mean - expected).norm() < 0.15 * expected.norm()


def test_distances() -> None:
    target, x = normal(60, 6), normal(60, 6, seed=1) + normal(60, 6)

    def distance(kernel: str, batch: int) -> tuple[Tensor, Tensor | slice]:
        alignment = Alignment(kernel, target, batch=batch, generator=generator())  # type: ignore[arg-type]
        rows = alignment.rows()
        return alignment.distance(x[rows], rows), rows

    for batch in (0, 60):
        value, rows = distance("linear", batch)
        torch.testing.assert_close(value, 1 - linear_cka(x, target))
        assert rows == slice(0, 60)
    value, rows = distance("linear", 20)
    torch.testing.assert_close(value, 1 - debiased_linear_cka(x[rows], target[rows]))
    value, rows = distance("procrustes", 20)
    torch.testing.assert_close(value, procrustes_distance(x, target))
    value, rows = distance("rbf", 20)
    torch.testing.assert_close(value, 1 - kernel_cka(rbf_kernel(x[rows]), rbf_kernel(target[rows]), debiased=True))

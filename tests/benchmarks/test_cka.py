"""Cost of FedHeNN's alignment term: time a step against the L x L forms, bytes a round against the kernel.

L = 5000 RAD images, features 64 wide, 10 peers with features relu(Z M_i), Z of 32 shared latent columns.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fedhet.algorithms.alignment.packing import Packed, pack, unpack
from fedhet.algorithms.alignment.targets import compress, mean_target
from fedhet.algorithms.alignment.term import Alignment

pytestmark = pytest.mark.benchmark

ROWS, WIDTH, PEERS, LATENT = 5000, 64, 10, 32
ROUNDS = 11
MEGABYTE = 1e6


def all_features(seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """The peers' features and another client's."""
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(ROWS, LATENT, generator=generator)
    features = [(latent @ torch.randn(LATENT, WIDTH, generator=generator)).relu() for _ in range(PEERS + 1)]
    return features[:-1], features[-1]


def size(packed: Packed) -> int:
    return sum(value.nbytes for value in packed.values() if isinstance(value, np.ndarray))


def dense_cka(k: Tensor, target: Tensor, centre: Tensor) -> Tensor:
    """CKA with both sides double-centred by products of L x L matrices, every step."""
    k, target = centre @ k @ centre, centre @ target @ centre
    return (k * target).sum() / (k.norm() * target.norm())


def precentred_cka(a: Tensor, target: Tensor) -> Tensor:
    """CKA of centred features with an L x L target that was centred and divided by its norm beforehand.

    The fastest way to use such a target: `<a a^T, T> = <a, T a>`, and no second L x L matrix.
    """
    return (a * (target @ a)).sum() / (a.T @ a).norm()


def seconds(step: Callable[[Tensor], Tensor], features: Tensor) -> float:
    x = features.clone().requires_grad_()
    start = time.perf_counter()
    step(x).backward()
    return time.perf_counter() - start


def test_seconds_a_step() -> None:
    """The term's forward and backward pass; three minutes or more, nearly all of them in the double-centred form."""
    peers, features = all_features()
    weights = [1 / PEERS] * PEERS
    kernel = sum((w * (a @ a.T) for w, a in zip(weights, peers, strict=True)), torch.zeros(ROWS, ROWS))
    centre = torch.eye(ROWS) - 1 / ROWS
    centred = kernel - kernel.mean(0) - kernel.mean(1)[:, None] + kernel.mean()
    centred /= centred.norm()
    factor = mean_target(peers)
    default = Alignment("linear", factor, batch=128, generator=torch.Generator().manual_seed(0))
    full = Alignment("linear", factor, batch=0, generator=torch.Generator())

    def term(alignment: Alignment) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            rows = alignment.rows()
            return alignment.distance(x[rows], rows)

        return step

    sides: dict[str, Callable[[Tensor], Tensor]] = {
        "128-row batches (default)": term(default),
        "whole RAD, feature space": term(full),
        "L x L, target centred before": lambda x: 1 - precentred_cka(x - x.mean(0), centred),
        "L x L, double-centred": lambda x: 1 - dense_cka(x @ x.T, kernel, centre),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, step in sides.items():
            times[name].append(seconds(step, features))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    fastest, whole, before, double = medians.values()
    print(f"\nL = {ROWS}, d = {WIDTH}, {PEERS} peers, rank {factor.shape[1]}, {torch.get_num_threads()} threads")
    for name, median in medians.items():
        print(f"  {name:<30} {median * 1e3:10.2f} ms a step   1 / {median / fastest:,.0f}")
    print(f"  whole RAD in feature space: {double / whole:,.0f} and {before / whole:.1f} times faster than L x L")
    assert double >= 1000 * fastest
    assert before >= 5 * fastest
    assert double >= 1000 * whole


def test_bytes_a_round() -> None:
    """A whole exchange: features up, mean down, both compressed, the gradient at another client's features."""

    def gradient(x: Tensor, target: Tensor) -> Tensor:
        x = x.double().requires_grad_()
        alignment = Alignment("linear", target.double(), batch=0, generator=torch.Generator())
        (result,) = torch.autograd.grad(alignment.distance(x, alignment.rows()), x)
        return result

    print(f"\nL = {ROWS}, d = {WIDTH}, {PEERS} peers; the kernel in float32: {ROWS * ROWS * 4 / MEGABYTE:.0f} MB")
    for seed in range(3):
        peers, features = all_features(seed)
        uploads = [pack(compress(a)) for a in peers]
        received = [unpack(upload) for upload in uploads]
        exact = gradient(features, torch.cat([a.double() - a.double().mean(0) for a in peers], 1))
        factor = mean_target(received)
        download = pack(factor)
        error = float((gradient(features, unpack(download)) - exact).norm() / exact.norm())
        up, down = max(size(upload) for upload in uploads), size(download)
        print(
            f"  seed {seed}: rank {factor.shape[1]}, up {up / MEGABYTE:.2f} MB, "
            f"down {down / MEGABYTE:.2f} MB, gradient error {error:.3%}"
        )
        assert down <= 4 * MEGABYTE
        assert up <= MEGABYTE
        assert error <= 0.003

    noise = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index)) for index in range(PEERS)]
    single, mean = compress(noise[0]), mean_target(noise)
    print(f"  white noise: whole, up {size(pack(single)) / MEGABYTE:.2f} MB, down {size(pack(mean)) / MEGABYTE:.2f} MB")
    assert (single.shape, mean.shape) == ((ROWS, WIDTH), (ROWS, PEERS * WIDTH))

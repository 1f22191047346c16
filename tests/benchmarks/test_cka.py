"""Bytes of a round of FedHeNN with the kernel target, against the kernel.

L = 5000 RAD images, features 64 wide, 10 peers with features relu(Z M_i), Z of 32 shared latent columns.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from fedhet.algorithms.alignment.cka import Alignment
from fedhet.algorithms.alignment.packing import Packed, pack, unpack
from fedhet.algorithms.alignment.targets import compress, mean_target

pytestmark = pytest.mark.benchmark

ROWS, WIDTH, PEERS, LATENT = 5000, 64, 10, 32
MEGABYTE = 1e6


def all_features(seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """The peers' features and another client's."""
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(ROWS, LATENT, generator=generator)
    features = [(latent @ torch.randn(LATENT, WIDTH, generator=generator)).relu() for _ in range(PEERS + 1)]
    return features[:-1], features[-1]


def size(packed: Packed) -> int:
    return sum(value.nbytes for value in packed.values() if isinstance(value, np.ndarray))


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

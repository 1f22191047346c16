"""Cost of FedHARM's descriptors against the bare forward and backward passes of the same images.

1000 images of 64 x 64, ResNet-18, batches of 64, one thread. The backward passes of descriptors go to the outputs of
four blocks only; the bare ones make gradients of all weights, as a step of training does.
"""

import statistics
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet import models
from fedhet.algorithms.alignment.descriptors import BATCH, describe
from fedhet.algorithms.graphs import blocks

pytestmark = pytest.mark.benchmark

SIZE, SLOTS, ROUNDS = 64, (128, 256, 512, 1024), 3


def identity(batch: Tensor) -> Tensor:
    return batch


def prepared(count: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = models.build("torchvision/resnet18", (3, SIZE, SIZE), 10).eval()
    return model, torch.randn(count, 3, SIZE, SIZE), torch.randint(10, (count,))


def descriptors(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    describe(model, blocks(model, images[:2]), images, labels, SLOTS, identity)


def bare(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    for batch, classes in zip(images.split(BATCH), labels.split(BATCH), strict=True):
        model.zero_grad()
        F.cross_entropy(model(batch), classes).backward()


def seconds(work: Callable[..., None], *args: object) -> float:
    start = time.perf_counter()
    work(*args)
    return time.perf_counter() - start


def test_descriptors_take_less_than_the_bare_passes() -> None:
    torch.set_num_threads(1)
    model, images, labels = prepared(1000)
    for work in (descriptors, bare):
        work(model, images[:BATCH], labels[:BATCH])
    # Turn about, so that what else the machine does falls on both.
    taken = [(seconds(descriptors, model, images, labels), seconds(bare, model, images, labels)) for _ in range(ROUNDS)]
    ratio = statistics.median(mine / its for mine, its in taken)
    mine, its = (statistics.median(times) for times in zip(*taken, strict=True))
    print(f"\ndescriptors of 1000 images {mine:.1f} s, bare passes {its:.1f} s: {ratio:.2f} times")
    assert ratio <= 0.9

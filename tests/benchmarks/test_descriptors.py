"""Cost of FedHARM's descriptors against the bare forward and backward passes of the same images.

1000 images of 64 x 64, ResNet-18, batches of 64, one thread. The backward passes of descriptors go to the outputs of
four blocks only; the bare ones make gradients of all weights, as a step of training does.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

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


def test_descriptors_need_less_memory_than_the_bare_passes() -> None:
    """Peak resident memory of a whole process that does one of them, for four batches."""
    peaks = {}
    for work in ("descriptors", "bare"):
        code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
torch.set_num_threads(1)
import test_descriptors as own
def peak():
    # Not getrusage, which counts what the process had before it became this one.
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
model, images, labels = own.prepared(4 * own.BATCH)
before = peak()
own.{work}(model, images, labels)
print(before / 1024, peak() / 1024)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        before, peak = map(float, done.stdout.split())
        peaks[work] = peak - before
    print(f"\npeak memory beyond the network and images: {peaks['descriptors']:.0f} MB, bare {peaks['bare']:.0f} MB")
    assert peaks["descriptors"] < peaks["bare"]

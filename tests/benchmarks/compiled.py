"""`torch.compile` on a batch of networks: `python tests/benchmarks/compiled.py cnn-2-2 mlp-100`.

A forward and backward pass of 20 networks as one, batches of 16 of 8 x 8 pixels, on one core: the best of ten means
over twenty passes, and what compiling took.
"""

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from fedhet import models

NETWORKS, BATCH, SHAPE, CLASSES = 20, 16, (1, 8, 8), 10


def measure(architecture: str) -> None:
    """Print a line."""
    networks = [models.build(architecture, SHAPE, CLASSES) for _ in range(NETWORKS)]
    parameters, buffers = stack_module_state(networks)
    inputs, labels = torch.randn(NETWORKS, BATCH, *SHAPE), torch.randint(CLASSES, (NETWORKS, BATCH))

    def one(own: dict[str, Tensor], its: dict[str, Tensor], batch: Tensor) -> Tensor:
        outputs: Tensor = functional_call(networks[0], {**own, **its}, (batch,))
        return outputs

    def step(passed: Callable[..., Tensor]) -> None:
        outputs = passed(parameters, buffers, inputs)
        loss = torch.stack([F.cross_entropy(*each) for each in zip(outputs, labels, strict=True)]).sum()
        torch.autograd.grad(loss, list(parameters.values()))

    def seconds(passed: Callable[..., Tensor]) -> float:
        start = time.perf_counter()
        for _ in range(20):
            step(passed)
        return (time.perf_counter() - start) / 20

    plain = vmap(one)
    compiled = torch.compile(plain, dynamic=False)
    start = time.perf_counter()
    step(compiled)
    compiling = time.perf_counter() - start
    pairs = [(seconds(plain), seconds(compiled)) for _ in range(10)]
    best, other = map(min, zip(*pairs, strict=True))
    print(f"{architecture}: {1e3 * best:.1f} ms, compiled {1e3 * other:.1f} ms, after {compiling:.0f} s of compiling")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        measure(name)

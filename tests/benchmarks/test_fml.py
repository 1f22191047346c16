"""A step of FML against a plain step of each of its two networks and the divergences between them."""

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet import training
from fedhet.config import configuration
from fedhet.data import Examples
from fedhet.engines.running import run_locally
from fedhet.training import Phase, Trained
from fedhet.utils.machine import one_thread

pytestmark = pytest.mark.benchmark

BATCH, RATE, EPOCHS, LIMIT = 16, 0.05, 5, 1.1


def plain_steps(
    own: nn.Module, small: nn.Module, examples: Examples, prepare: Callable[[Tensor], Tensor], *, mutual: bool = True
) -> float:
    """Train both networks by equations 1 and 2 of FML's paper, or each by itself, in plain PyTorch.

    Returns the CPU time of a step.
    """
    optimizers = [torch.optim.SGD(network.parameters(), lr=RATE) for network in (own, small)]
    started, steps = time.process_time(), 0
    own.train()
    small.train()
    for _ in range(EPOCHS):
        for index in torch.randperm(len(examples)).split(BATCH):
            inputs, labels = prepare(examples.inputs[index]), examples.labels[index]
            outputs, shared = own(inputs), small(inputs)
            for scores, others, optimizer in zip((outputs, shared), (shared, outputs), optimizers, strict=True):
                loss = F.cross_entropy(scores, labels)
                if mutual:
                    logs = scores.log_softmax(1), others.detach().log_softmax(1)
                    loss = 0.5 * loss + 0.5 * F.kl_div(*logs, reduction="batchmean", log_target=True)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            steps += 1
    return (time.process_time() - started) / steps


@pytest.mark.parametrize("architectures", ["cnn-family", "mlp"])
def test_a_step_costs_little_more_than_those_of_its_networks(
    architectures: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client's training in a run, and a bare loop with copies of its networks behind it."""
    ours, theirs, apart, train = list[float](), list[float](), list[float](), training.train

    def timed(model: nn.Module, phase: Phase, examples: Examples, *others: Any, **further: Any) -> Trained:
        started = time.process_time()
        trained = train(model, phase, examples, *others, **further)
        ours.append((time.process_time() - started) / trained.work.steps)
        for times, mutual in ((theirs, True), (apart, False)):
            networks = [copy.deepcopy(getattr(phase.module, name)) for name in ("own", "small")]
            prepare = partial(others[1], generator=further["generator"])
            times.append(plain_steps(*networks, examples, prepare, mutual=mutual))
        return trained

    monkeypatch.setattr(training, "train", timed)
    own = {"method": "fml", "dataset": "digits", "clients": 10, "rounds": 11, "architectures": architectures}
    own |= {"batch-size": BATCH, "learning-rate": RATE, "local-epochs": EPOCHS, "workers": 1}
    shared = {"cnn-family": "cnn-1-1", "mlp": "mlp"}[architectures]
    config = configuration.resolve({**own, "momentum": 0.0, "fml.shared-model": shared, "report": False})
    with one_thread():
        run_locally(config, tmp_path / "run")
    step = statistics.median(ours[10:])  # without the first round
    ratio, two = (
        statistics.median(one / other for one, other in zip(ours[10:], each[10:], strict=True))
        for each in (theirs, apart)
    )
    print(
        f"\n{architectures}: FML {1e3 * step:.2f} ms a step, {ratio:.2f} of a plain one (<= {LIMIT}), {two:.2f} of one "
        "of each network by itself"
    )
    assert ratio <= LIMIT

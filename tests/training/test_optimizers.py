"""Torch's optimisers without torch's compiler and profiler; `tests/test_running.py` has that a run imports neither."""

import pytest
import torch
from torch import nn

from fedhet.training import eager


def stepped(kind, **keys):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = kind(model.parameters(), lr=0.1, fused=True, **keys)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return model.weight, optimizer


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
    ],
)
def test_same_steps_as_torch(kind, keys):
    before = kind.step
    weight, optimizer = stepped(eager(kind), **keys)
    assert isinstance(optimizer, kind)
    assert optimizer.defaults == stepped(kind, **keys)[1].defaults
    assert torch.equal(weight, stepped(kind, **keys)[0])
    assert weight.requires_grad
    assert weight.grad_fn is None
    assert before in (kind.step, kind.step.__wrapped__), "torch hooks a class's first step"

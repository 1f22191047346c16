"""Divergences of softened predictions by hand, and torch's optimisers without torch's compiler and profiler.

`tests/test_running.py` has that a run imports neither.
"""

import pytest
import torch
from torch import nn

from fedhet.training import eager, soft_divergence


@pytest.mark.parametrize("many_labels", [False, True])
def test_divergence_by_hand(many_labels):
    generator = torch.Generator().manual_seed(0)
    outputs, wanted = (3 * torch.randn(5, 4, generator=generator) for _ in range(2))
    soften = torch.sigmoid if many_labels else (lambda logits: logits.softmax(-1))
    p, q = soften(wanted / 2.5), soften(outputs / 2.5)
    summands = p * (p / q).log()
    expected = (summands + (1 - p) * ((1 - p) / (1 - q)).log()).mean() if many_labels else summands.sum(-1).mean()
    found = soft_divergence(outputs, wanted, 2.5, many_labels=many_labels)
    torch.testing.assert_close(found, expected)


def test_scale_at_high_temperature():
    # As T grows, T^2 KL tends to the mean over predictions of |z - v|^2 / (2 C) of centred logits (Hinton et al., 2.1).
    generator = torch.Generator().manual_seed(1)
    outputs, wanted = (torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    centred = (outputs - outputs.mean(-1, keepdim=True)) - (wanted - wanted.mean(-1, keepdim=True))
    expected = centred.square().sum(-1).mean() / 8
    torch.testing.assert_close(1e6 * soft_divergence(outputs, wanted, 1e3), expected, rtol=1e-2, atol=0)


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

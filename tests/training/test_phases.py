"""Divergences of softened predictions by hand, and torch's optimisers without torch's compiler and profiler.

`tests/test_running.py` has that a run imports neither.
"""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fedhet.tasks import Task
from fedhet.training import Optimisation, Step, eager, soft_divergence
from fedhet.training.phases import decayed


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


@pytest.mark.parametrize("ignored", [-100, 3])
@pytest.mark.parametrize("task", ["token-classification", "segmentation"])
def test_labels_that_do_not_count_have_no_divergence(task, ignored):
    generator = torch.Generator().manual_seed(0)
    outputs, wanted = (torch.randn(2, 5, 3, generator=generator) for _ in range(2))
    labels = torch.tensor([[0, 1, 2, 0, ignored], [1, ignored, ignored, ignored, ignored]])
    counted = labels != ignored
    expected = soft_divergence(outputs[counted], wanted[counted], 1.0)
    loss = nn.CrossEntropyLoss(ignore_index=ignored)
    if task == "segmentation":
        outputs, wanted = (each[:, None].movedim(-1, 1) for each in (outputs, wanted))
        labels = labels[:, None]
    rows = torch.arange(2)
    step = Step(0, nn.Identity(), {}, outputs, labels, rows, outputs, task=Task(task, loss=loss))
    torch.testing.assert_close(step.divergence(outputs, wanted), expected)


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


class T5LayerNorm(nn.Module):
    """A normalisation layer as transformers has it."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, size))


class NormedLinear(nn.Module):
    """A layer of cosines, whose weight is a matrix."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, size))


class Affine(nn.Module):
    """A user's own normalisation under another name."""

    def __init__(self, size):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))


EXEMPT = {
    *("norm.weight", "norm.bias", "batch.weight", "batch.bias", "own.weight", "linear.bias", "lstm.bias_ih_l0"),
    *("lstm.bias_hh_l0", "cosine.bias", "position_bias_table", "b", "group.weight", "group.bias"),
    *("affine.gamma", "affine.beta"),
    *("convolution.parametrizations.bias.original0", "convolution.parametrizations.bias.original1"),
}


class EnormousNet(nn.Module):
    """Layers with weight decay and without."""

    def __init__(self):
        super().__init__()
        self.norm, self.batch, self.own = nn.LayerNorm((2, 3, 3)), nn.BatchNorm1d(3), T5LayerNorm(3)
        self.linear, self.lstm, self.group = nn.Linear(3, 3), nn.LSTM(3, 3), nn.GroupNorm(1, 3)
        self.convolution = parametrizations.weight_norm(parametrizations.weight_norm(nn.Conv1d(3, 3, 1)), "bias")
        self.angle, self.affine = NormedLinear(3), Affine(3)
        self.cosine = type("NormLinear", (nn.Linear,), {})(3, 3)
        self.scale, self.token = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1, 1, 3))
        self.position_bias_table, self.b = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.zeros(1, 3))


def test_biases_and_normalisation_have_no_weight_decay():
    model = EnormousNet()
    names, parameters = zip(*model.named_parameters(), strict=True)
    chosen = decayed(model, parameters)
    assert {name for name, decays in zip(names, chosen, strict=True) if not decays} == EXEMPT
    stacked = [torch.stack([parameter, parameter]).detach() for parameter in parameters]
    groups = Optimisation(weight_decay=0.1).build(model, parameters, stacked).param_groups
    assert [len(group["params"]) for group in groups] == [sum(chosen), len(EXEMPT)]
    assert [group["weight_decay"] for group in groups] == [0.1, 0]

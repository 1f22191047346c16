"""The distance of softened predictions, against sums by hand."""

import pytest
import torch

from fedhet.training import soft_divergence


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


@pytest.mark.parametrize("many_labels", [False, True])
def test_zero_for_equal_predictions(many_labels):
    wanted = torch.tensor([[2.0, -1.0, 0.5]], requires_grad=True)
    same = soft_divergence(wanted.detach().clone(), wanted, 20.0, many_labels=many_labels)
    torch.testing.assert_close(same, torch.tensor(0.0), atol=1e-6, rtol=0)
    outputs = torch.zeros(1, 3, requires_grad=True)
    soft_divergence(outputs, wanted, 20.0, many_labels=many_labels).backward()
    assert wanted.grad is None
    assert (outputs.grad * (wanted.detach() - wanted.detach().mean())).sum() < 0, "it pulls towards the teacher"


def test_scale_at_high_temperature():
    # As T grows, T^2 KL tends to the mean over predictions of |z - v|^2 / (2 C) of centred logits (Hinton et al., 2.1).
    generator = torch.Generator().manual_seed(1)
    outputs, wanted = (torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    centred = (outputs - outputs.mean(-1, keepdim=True)) - (wanted - wanted.mean(-1, keepdim=True))
    expected = centred.square().sum(-1).mean() / 8
    torch.testing.assert_close(1e6 * soft_divergence(outputs, wanted, 1e3), expected, rtol=1e-2, atol=0)

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


def test_scale_at_high_temperature():
    # As T grows, T^2 KL tends to the mean over predictions of |z - v|^2 / (2 C) of centred logits (Hinton et al., 2.1).
    generator = torch.Generator().manual_seed(1)
    outputs, wanted = (torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    centred = (outputs - outputs.mean(-1, keepdim=True)) - (wanted - wanted.mean(-1, keepdim=True))
    expected = centred.square().sum(-1).mean() / 8
    torch.testing.assert_close(1e6 * soft_divergence(outputs, wanted, 1e3), expected, rtol=1e-2, atol=0)

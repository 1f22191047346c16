"""Class scores against plain computations."""

import pytest
import torch
from torch import nn

from fedhet.representations.scores import posteriors, scores_of


def test_scores_are_of_the_evaluation_mode_and_of_all_examples_at_once_or_not() -> None:
    model, inputs = nn.Sequential(nn.Dropout(0.9), nn.Linear(3, 4)), torch.randn(600, 3)
    logits = model[1](2 * inputs).detach()
    torch.testing.assert_close(posteriors(model, inputs, lambda x: 2 * x), logits.softmax(1))
    torch.testing.assert_close(scores_of(logits, 600, "logits"), logits)
    with pytest.raises(ValueError, match=r"probabilities need outputs of shape \(600, classes\), got \(600, 3, 1\)"):
        posteriors(nn.Identity(), inputs[:, :, None], lambda x: x)

"""Class scores against plain computations."""

import pytest
import torch

from fedhet.errors import ModelError
from fedhet.representations.scores import scores_of


def test_scores_are_of_one_row_an_example() -> None:
    logits = torch.randn(600, 4)
    assert torch.equal(scores_of(logits, 600, "logits"), logits)
    torch.testing.assert_close(scores_of(logits, 600, "probabilities"), logits.softmax(1))
    with pytest.raises(ModelError, match=r"logits need outputs of shape \(600, classes\), got \(600, 3, 1\)"):
        scores_of(torch.zeros(600, 3, 1), 600, "logits")

"""Networks and inputs of these tests are drawn anew for each, whichever tests ran before."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)

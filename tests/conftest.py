"""Fixtures that every part's tests share."""

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder with cases from the reference implementations; tests that need it skip without it."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "reference"
    folder = Path(os.environ.get("FEDHET_REFERENCE", beside))
    if not folder.is_dir():
        pytest.skip("no reference cases here: set FEDHET_REFERENCE to their folder")
    return folder

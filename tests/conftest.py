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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests and benchmarks out unless they are asked for: by `-m`, by name, or by their folder."""
    if config.option.markexpr or any("::" in arg for arg in config.args):
        return
    left_out = {"slow"} if any("benchmarks" in arg for arg in config.args) else {"slow", "benchmark"}
    chosen, others = [], []
    for item in items:
        (others if any(item.get_closest_marker(name) for name in left_out) else chosen).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen

"""Fixtures of results: folders of runs written by hand."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from synthetic_runs import write_run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`write_run` into a new folder."""

    def make(name: str = "run", **options: Any) -> Path:
        return write_run(tmp_path / name, **options)

    return make

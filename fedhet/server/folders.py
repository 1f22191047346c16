"""The folder in which a run is recorded."""

import time
from collections.abc import Callable
from pathlib import Path

from fedhet.flower import Grid
from fedhet.flower.grid import LocalGrid
from fedhet.methods.options import Config


def new_folder(parent: Path, config: Config) -> Path:
    """Return a path for a new run folder, named after the method, the data set and the time."""
    folder = parent / f"{config.method_name}-{config.dataset}-{time.strftime('%Y%m%d-%H%M%S')}"
    return numbered(folder, Path.exists)


def run_folder(config: Config, grid: Grid) -> Path:
    """Return the folder for a run: `out`, or `out-2`, `out-3`, ... if `out` has a run and `resume` is not set.

    Flower's runtime works in the folder where its SuperLink was started, so a relative folder is in `~/.fedhet` there.
    """
    home = Path() if isinstance(grid, LocalGrid) else Path.home() / ".fedhet"
    if not config.out:
        return new_folder(home / "runs", config).resolve()
    folder = (home / config.out).resolve()
    return folder if config.resume else numbered(folder, lambda place: (place / "config.toml").exists())


def numbered(folder: Path, taken: Callable[[Path], bool]) -> Path:
    """Return the first of `folder`, `folder-2`, `folder-3`, ... that is not taken."""
    names = (folder.name if number == 1 else f"{folder.name}-{number}" for number in range(1, 100_000))
    return next(place for name in names if not taken(place := folder.with_name(name)))

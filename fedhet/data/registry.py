"""Data sets by name."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedhet.data.examples import DataSet, resized
from fedhet.errors import DataError, nearest

Loader = Callable[[Path | None], DataSet]
"""Loads a data set from a folder; None if the user named none."""

LOADED: dict[tuple[str, Path | None, int], DataSet] = {}
"""Data sets that this process has loaded, by name, folder and input size. Worker processes receive them."""

_LOADERS: dict[str, Loader] = {}
_AUGMENTED: set[str] = set()
_INCLUDED: set[str] = set()


def register_dataset(name: str, *, augments: bool = False, included: bool = False) -> Callable[[Loader], Loader]:
    """Return a decorator that registers a loader under `name`.

    `augments` states whether the data set has an augmentation, `included` whether it is loaded without a folder.
    """

    def register(loader: Loader) -> Loader:
        if name in _LOADERS:
            raise DataError(f"a data set named {name!r} is registered already: choose another name")
        _LOADERS[name] = loader
        if augments:
            _AUGMENTED.add(name)
        if included:
            _INCLUDED.add(name)
        return loader

    return register


def names() -> list[str]:
    """Return the names of the data sets, sorted."""
    return sorted(_LOADERS)


def augments(name: str) -> bool:
    """Return whether a data set has an augmentation, without loading the data set."""
    return name in _AUGMENTED


def needs_no_folder(name: str) -> bool:
    """Return whether a data set comes with an installed package, so that no folder has its files."""
    return name in _INCLUDED


def load(name: str, folder: str | Path | None = None, *, input_size: int = 0) -> DataSet:
    """Load a data set; the same arguments return the same object.

    The folder is by default the user's cache folder, to which missing files are downloaded. Images are resized to
    height and width `input_size`, unless that is 0. Raises a `DataError` for unknown names and missing or damaged
    files.
    """
    key = (name, Path(folder).expanduser() if folder else None, input_size)
    if key not in LOADED:
        if name not in _LOADERS:
            raise DataError(nearest("data set", name, _LOADERS))
        LOADED[key] = _resized(load(name, folder), input_size) if input_size else _LOADERS[name](key[1])
    return LOADED[key]


def _resized(dataset: DataSet, size: int) -> DataSet:
    if size < 0 or len(dataset.input_shape) != 3:
        raise DataError(f"input-size = {size} is for images, not for {dataset.name}: leave it out")
    transform = partial(resized, transform=dataset.transform, size=size)
    return replace(dataset, input_shape=(dataset.input_shape[0], size, size), transform=transform)

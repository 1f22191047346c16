"""Data sets by name."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedhet.data.examples import DataSet, resized
from fedhet.errors import DataError, nearest
from fedhet.utils.files import expanded

Loader = Callable[[Path | None], DataSet]
"""A function that loads a data set from a folder, or from its default place if the folder is None."""

LOADED: dict[tuple[str, Path | None, int], DataSet] = {}
"""Data sets that this process has loaded, by (name, folder, input size); they are copied to worker processes."""

_LOADERS: dict[str, Loader] = {}
_WITHOUT_EFFECT: dict[str, set[str]] = {}


def register_dataset(name: str, *, augments: bool = False, included: bool = False) -> Callable[[Loader], Loader]:
    """Return a decorator that registers a loader under `name`.

    `augments` states whether the data set has an augmentation, `included` whether an installed package contains it.
    """

    def register(loader: Loader) -> Loader:
        _LOADERS[name] = loader
        _WITHOUT_EFFECT[name] = {key for key, used in {"data": not included, "augment": augments}.items() if not used}
        return loader

    return register


def names() -> list[str]:
    """Return the names of the data sets, sorted."""
    return sorted(_LOADERS)


def keys_without_effect(name: str) -> set[str]:
    """Return the configuration keys among `data` and `augment` that have no effect on a data set; does not load it."""
    return _WITHOUT_EFFECT.get(name, {"augment"})


def load(name: str, folder: str | Path | None = None, *, input_size: int = 0) -> DataSet:
    """Load a registered data set by name; the same arguments return the same object.

    Without `folder`, missing files are downloaded to the user's cache folder. Images are resized to height and width
    `input_size`, unless that is 0. Raises a `DataError` for unknown names and missing or damaged files.
    """
    key = (name, expanded(folder) if folder else None, input_size)
    if key not in LOADED:
        if name not in _LOADERS:
            raise DataError(nearest("data set", name, _LOADERS))
        dataset = load(name, folder) if input_size else _LOADERS[name](key[1])
        if input_size:
            if len(dataset.input_shape) != 3:
                raise DataError(f"input-size = {input_size} is for images, not for {name}: leave it out")
            transform = partial(resized, transform=dataset.transform, size=input_size)
            shape = (dataset.input_shape[0], input_size, input_size)
            dataset = replace(dataset, input_shape=shape, transform=transform)
        LOADED[key] = dataset
    return LOADED[key]

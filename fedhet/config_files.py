"""Configuration files: those that users write, and those in the folders of runs, which are data and may be anybody's.

What a user names may be code, such as `method = "package.module:name"`; nothing is imported because data name it.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from fedhet import registry, toml
from fedhet.errors import ConfigError

EXTRA = "extra-keys"
"""Key under which Flower's run config, which takes declared keys only, carries those of a method from outside."""


def from_file(path: Path, given: Collection[str] = (), method: object = None) -> dict[str, Any]:
    """The settings of a file that a user names: as it says, or as `from_run` where it lies in the folder of a run.

    Args:
        path: the file.
        given: of a run with a user's own `model` or `data`, those that are given again.
        method: the method that is set by hand, in place of the file's.

    Raises:
        ConfigError: the file is missing or is not TOML, or as `from_run`.
    """
    of_run = (path.parent / "history.jsonl").exists() or "ran" in toml.load(path)
    return from_run(path, given, method) if of_run else toml.read(path, given)


def from_run(path: Path, given: Collection[str] = (), method: object = None) -> dict[str, Any]:
    """The settings of `config.toml` in the folder of a run; the arguments are those of `from_file`.

    Raises:
        ConfigError: the file cannot be read, it is of a run with something that is not given again, or it names a
            method that is neither known here nor named by the user.
    """
    settings = toml.read(path, given)
    if EXTRA in settings:
        raise ConfigError(f"{path}: {EXTRA} is of Flower's run config, and no key of a run's own configuration")
    if method is not None:
        return settings | {"method": method}
    if "method" in settings:
        registry.of_data(str(settings["method"]), path)
    return settings

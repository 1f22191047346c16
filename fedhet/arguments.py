"""The parts of a command line as values: settings, places and lists."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from fedhet import config as configuration
from fedhet.errors import ConfigError


class Place(click.Path):
    """A file or folder; an empty name, which would stand for the working folder, is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, as click has it."""
        if not str(value) or "\0" in str(value):
            self.fail("this is no name of a file or folder: give one, or leave the option out", param, ctx)
        return super().convert(Path(value).expanduser(), param, ctx)


def settings_of(settings: Sequence[str] | None, **options: str | int | Path | None) -> dict[str, Any]:
    """The keys that a command line sets, by `--set` or by an option of their own.

    Raises:
        ConfigError: a key has no value, or is set twice.
    """
    chosen: dict[str, Any] = configuration.parse_settings(settings or ())
    for key, value in options.items():
        if value is None:
            continue
        if key in chosen:
            raise ConfigError(f"--{key} {value} and --set {key} say the same: give one of them")
        if value == "":
            raise ConfigError(f"--{key}: there is no value; give one, or leave the option out")
        chosen[key] = str(value) if isinstance(value, Path) else value
    return chosen


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers, separated by commas.

    Raises:
        ConfigError: they are not; with the option.
    """
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text}: write whole numbers with commas, such as 0,1,2") from None


def grid(settings: Sequence[str]) -> dict[str, list[Any]]:
    """The values that `--tune` names, by key.

    Raises:
        ConfigError: there are none, or a key is named twice.
    """
    found: dict[str, list[Any]] = {}
    for text in settings:
        name, equals, values = text.partition("=")
        key = name.rpartition(":")[2].strip()
        if not equals or not all(value.strip() for value in values.split(",")):
            raise ConfigError(f"--tune {text}: write KEY=V1,V2,..., or NAME:KEY=V1,V2,... for one of the methods")
        if name.strip() in found:
            raise ConfigError(f"--tune {text}: {name.strip()} is tuned twice; name all of its values at once")
        found[name.strip()] = [configuration.parse_setting(f"{key}={value.strip()}")[1] for value in values.split(",")]
    return found

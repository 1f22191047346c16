"""Arguments and options of the command line, with their types, help and completion."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedhet.config import configuration
from fedhet.config.toml import parse_setting
from fedhet.errors import ConfigError
from fedhet.methods import registry
from fedhet.methods.method import KINDS


def path_of(name: str | Path) -> Path:
    """Convert an argument to a path; raises a `typer.BadParameter` if it cannot be one, such as an empty text."""
    if not str(name) or "\0" in str(name):
        raise typer.BadParameter(f"{name!r} is not the name of a file or folder: give its path, such as runs/one")
    return Path(os.path.expanduser(name))  # which returns `~` unchanged if the home folder is unknown


def method_names(incomplete: str) -> list[str]:
    """Return the names of methods that start with `incomplete`, for completion in a shell."""
    return [name for name in registry.methods() if name.startswith(incomplete)]


def known_names(incomplete: str) -> list[str]:
    """Return the names of methods and presets that start with `incomplete`, for completion in a shell."""
    return [*method_names(incomplete), *(name for name in configuration.presets() if name.startswith(incomplete))]


def _settings(incomplete: str) -> list[str]:
    return [f"{key}=" for key, *_ in configuration.keys() if key.startswith(incomplete)]  # noqa: SIM118


def place(help: str, metavar: str = "DIR") -> Any:
    """Return a typer option for the path of a file or folder, with its help text and its placeholder (`metavar`)."""
    return typer.Option(metavar=metavar, help=help, parser=path_of)


def _source(default: str) -> Any:
    words = f"A TOML file, a preset or a method (`fedhet list`); by default {default}."
    return typer.Argument(metavar="[CONFIG]", help=words, autocompletion=known_names)


Source = Annotated[str | None, _source("fedhenn/digits")]
Checked = Annotated[str | None, _source("the method local")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key (`fedhet keys`); repeatable.", autocompletion=_settings),
]
Named = Annotated[str | None, typer.Option("--method", metavar="MODULE:NAME", help="A method to import.")]
Data = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder with the data set's files.", parser=lambda name: path_of(name).resolve()),
]
StateDir = Annotated[Path | None, place("The node's state; by default ~/.fedhet/state.")]
Kinds = Annotated[
    str | None, typer.Option(metavar="KIND,...", help=f"What clients may send: {', '.join(KINDS)}; default: all.")
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default as many as fit in memory.")]
Folders = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Run directories, or the folder of a comparison.", parser=path_of)
]
Tune = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME:]KEY=V1,V2,...",
        help="Choose a key's value for every method, or for one, by validation accuracy before the runs; repeatable.",
    ),
]
TuneRuns = Annotated[
    int | None,
    typer.Option(min=1, help="Configurations to try for each method; by default as many as the largest grid has."),
]


def numbers(option: str, text: str) -> list[int]:
    """Parse whole numbers separated by commas; if this fails, raises a ConfigError with the name of the `option`."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text}: write whole numbers separated by commas, such as 0,1,2") from None


def tuning_grid(settings: Sequence[str]) -> dict[str, list[Any]]:
    """Return values by key from texts `KEY=V1,V2`; raises a ConfigError for invalid texts and repeated keys."""
    grid: dict[str, list[Any]] = {}
    for text in settings:
        name, equals, values = text.partition("=")
        key = name.rpartition(":")[2].strip()
        if not equals or not all(value.strip() for value in values.split(",")):
            raise ConfigError(f"--tune {text}: write KEY=V1,V2,..., or NAME:KEY=V1,V2,... for one of the methods")
        if name.strip() in grid:
            raise ConfigError(f"--tune {text}: {name.strip()} is given twice; give all of its values in one --tune")
        grid[name.strip()] = [parse_setting(f"{key}={value.strip()}")[1] for value in values.split(",")]
    return grid

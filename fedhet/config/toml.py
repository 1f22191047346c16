"""TOML files and flat settings: a table in a file (`[fedhenn] eta0`) is a dotted key elsewhere (`fedhenn.eta0`)."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedhet.errors import ConfigError
from fedhet.methods.keys import Value

NOTED = ("versions", "ran", "own")
"""The tables in which a run notes beside its settings what it ran with."""

DEEPEST = 16
"""How many tables of a file may be nested; settings need two."""


def load(path: Path) -> dict[str, Any]:
    """A TOML file as it stands, its tables nested; a ConfigError if it is missing or is not TOML."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        if _depth(table) > DEEPEST:
            raise RecursionError
    except FileNotFoundError as error:
        raise ConfigError(f"no configuration file {path}") from error
    except (ValueError, OSError) as error:  # numbers of thousands of digits among them
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path} is not a TOML file of settings: it is nested too deeply") from None
    for noted in NOTED:
        if not isinstance(table.get(noted, {}), dict):
            raise ConfigError(f"{path}: {noted} must be a table, [{noted}]")
    return table


def _depth(value: Any) -> int:
    """Return how many tables and lists are nested."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def from_json(text: str, subject: str) -> dict[str, Any]:
    """Parse a flat table of settings from JSON; raises a ConfigError, which names it by `subject`."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{subject} cannot be read as JSON: {type(error).__name__}") from error
    if not isinstance(table, dict) or not all(isinstance(each, bool | int | float | str) for each in table.values()):
        raise ConfigError(f"{subject} must be a table of texts, numbers, true and false")
    return table


def chosen(table: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables as dotted keys, those left out that are `""`: not chosen, as in Flower's app table."""
    return {key: value for key, value in flatten(table).items() if value != ""}


def flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": leaf for inner, leaf in flatten(value).items()}
        else:
            flat[key] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested tables, the inverse of `flatten` but for empty tables."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *path, name = key.split(".")
        table = nested
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    return nested


def to_toml(flat: Mapping[str, Value]) -> str:
    """Flat keys as TOML text: plain keys in their order, then tables and their keys by name."""
    return tomli_w.dumps(nest(dict(sorted(flat.items(), key=lambda item: item[0] if "." in item[0] else ""))))


def toml_value(value: Value) -> str:
    """A value as TOML writes it."""
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")

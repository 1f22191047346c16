"""Read and write settings as TOML, JSON and `KEY=VALUE`; in TOML, `[fedhenn] eta0` is the key `fedhenn.eta0`."""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedhet.errors import ConfigError, damage, shown
from fedhet.methods.options import Value, fits, kebab

NOTED = ("versions", "ran", "own")
"""Tables that a run adds to its config.toml: versions of packages, its machine and command, and user functions."""

DEEPEST = 16  # maximum depth of nested tables in a file


def load(path: Path) -> dict[str, Any]:
    """Return the nested tables of a TOML file; raises a ConfigError if it is missing or is not TOML."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # reading it may never end
            raise ConfigError(f"{path} is a pipe or a device: give the path of a TOML file")
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors of Windows add a mark
        if _depth(table) > DEEPEST:
            raise ValueError("it is nested too deeply")
    except FileNotFoundError as error:
        raise ConfigError(f"the configuration file {path} does not exist: give the path of a TOML file") from error
    except (ValueError, OSError, RecursionError) as error:  # ValueError also for numbers with thousands of digits
        reason = str(getattr(error, "strerror", None) or error).partition(";")[0]  # without Python's advice
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else reason
        raise ConfigError(f"{path} is not a TOML file: {reason}; correct the file") from error
    if wrong := [noted for noted in NOTED if not isinstance(table.get(noted, {}), dict)]:
        raise ConfigError(f"{path}: {wrong[0]} cannot be a key, since runs write a table of this name: remove the key")
    return table


def _depth(value: Any) -> int:
    depth = 0
    level = [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def from_json(text: str, subject: str) -> dict[str, Any]:
    """Parse a JSON object with plain values; raises a ConfigError whose message names the text as `subject`."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"invalid JSON in {subject}, which must be replaced: {damage(error)}") from error
    if not isinstance(table, dict) or not all(isinstance(value, bool | int | float | str) for value in table.values()):
        raise ConfigError(f"{subject} must be a JSON object whose values are strings, numbers, true or false")
    return table


def chosen(table: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested tables to dotted kebab-case keys, without keys that have the value `""` (not set)."""
    flat: dict[str, Any] = {}
    for key, value in ((as_key(key), value) for key, value in flatten(table).items() if value != ""):
        if key in flat and flat[key] != value:
            raise ConfigError(f"{key} is set twice, to {flat[key]!r} and to {value!r}: set it once")
        flat[key] = value
    return flat


def flatten(table: Mapping[str, Any], depth: int = 1) -> dict[str, Any]:
    """Flatten nested tables: `{"a": {"b": 1}}` becomes `{"a.b": 1}`. Only recursive calls set `depth`, the level."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if not isinstance(key, str):
            raise ConfigError(f"config has the key {shown(key)}: keys must be text, such as 'rounds'")
        if isinstance(value, Mapping) and depth > DEEPEST:
            raise ConfigError(f"config is nested too deeply at {key!r}: use at most {DEEPEST} levels")
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": leaf for inner, leaf in flatten(value, depth + 1).items()}
        else:
            flat[key] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a dict with dotted keys to nested tables; the inverse of `flatten`, except for empty tables."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *path, name = key.split(".")
        table = nested
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    return nested


def to_toml(flat: Mapping[str, Value]) -> str:
    """Return values by dotted key as TOML text: top-level keys in their order, then tables sorted by name."""
    return tomli_w.dumps(nest(dict(sorted(flat.items(), key=lambda item: item[0] if "." in item[0] else ""))))


def toml_value(value: Value) -> str:
    """Return a value in TOML syntax."""
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")


def parse_settings(texts: Iterable[str]) -> dict[str, Value]:
    """Parse texts of the form `KEY=VALUE`; raises a ConfigError if a key or value is missing, or a key is set twice."""
    settings: dict[str, Value] = {}
    for text in texts:
        key, value = parse_setting(text)
        if value == "":
            raise ConfigError(f"--set {text}: there is no value; write KEY=VALUE, or leave the key out for its default")
        if key in settings:
            raise ConfigError(f"--set {text}: {key} is set twice, first to {settings[key]!r}: remove one of them")
        settings[key] = value
    return settings


def parse_setting(text: str) -> tuple[str, Value]:
    """Parse `KEY=VALUE`, with the value as TOML if possible, else as text; raises a ConfigError for any other form."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: write KEY=VALUE, such as rounds=5")
    number = re.sub(r"^([+-]?)\.(?=\d)", r"\g<1>0.", value.strip())  # .05 is not TOML
    try:
        parsed = tomllib.loads(f"value = {number}")["value"]
    except (ValueError, RecursionError):  # also for numbers with thousands of digits and deep nesting
        parsed = None
    if type(parsed) is int and not fits(parsed):
        parsed = None
    # Dates and lists are TOML as well, but no key accepts them.
    return as_key(key.strip()), parsed if isinstance(parsed, Value) else value


def as_key(dotted: str) -> str:
    """Return a dotted key with `-` for `_` in its last part: `fedprox.prox_mu` becomes `fedprox.prox-mu`."""
    prefix, dot, name = dotted.rpartition(".")
    return f"{prefix}{dot}{kebab(name)}"

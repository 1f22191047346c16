"""Configuration keys: dataclass fields with a default, a description, a subject and accepted values."""

import math
import operator
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field
from typing import Any, Literal, get_args

from fedhet.errors import ConfigError, shown

Value = bool | int | float | str
About = Literal["data", "training", "optimiser", "server", "node", "place", "output"]

KeyRow = tuple[str, Value, str, str]
"""A configuration key, its default, its accepted values and its description."""

OwnPart = Literal["data", "split", "model", "loader", "augmentation"]
"""What a user passes in Python and that replaces keys: data, their split (by a data function), a model, a DataLoader or
an augmentation."""

_LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool], str]] = {
    "at_least": (">=", operator.ge, "at least"),
    "above": (">", operator.gt, "above"),
    "at_most": ("<=", operator.le, "at most"),
    "below": ("<", operator.lt, "below"),
}


def option(
    default: Value,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    about: About = "training",
    at_node: bool = False,
    resumable: bool = False,
    path: bool = False,
    needs: Mapping[str, tuple[Value, ...] | Mapping[str, float]] | None = None,
    trait: str = "",
    replaced_by: tuple[OwnPart, ...] = (),
    at_need: Value | None = None,
) -> Any:
    """Return a dataclass field that is a configuration key; its type is a `Literal` if only few values are accepted.

    Args:
        default: the default value.
        help: a description in one line.
        at_least: smallest accepted number.
        above: exclusive lower limit.
        at_most: largest accepted number.
        below: exclusive upper limit.
        about: the subject: the clients' data (`data`), training (`training`, `optimiser`), how long the server waits
            for clients (`server`), computation on a client's machine (`node`), the place of a run (`place`), or its
            measurements and files (`output`). A comparison sets keys about data, place and output for all variants.
        at_node: whether a node may set the key for itself, in its node config.
        resumable: whether the value may change when a run is resumed.
        path: whether the value is a path, which must be set on the machine where it is used.
        needs: other keys, each with the values at which this key has an effect: a tuple of values, or limits such as
            `{"below": 1}`. An empty tuple stands for all values except 0 and "".
        trait: name of an attribute of `Traits`: the key has an effect if it is true or, as a tuple, contains the value.
        replaced_by: the key has no effect if the user passes all of these (see `OwnPart`).
        at_need: value that `fedhet recommend` tries if the method cannot be used with the default.
    """
    limits = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    kind = {"about": about, "at_node": at_node, "resumable": resumable, "path": path, "at_need": at_need}
    effect = {"needs": needs or {}, "trait": trait, "replaced_by": replaced_by}
    return field(default=default, metadata={"help": help, **limits, **kind, **effect})


def default_of(key: Field[Value]) -> Value:
    """Return the default of a key, given as its dataclass field."""
    assert key.default is not MISSING, f"option {key.name} needs a default"
    return key.default


def takes(key: Field[Any]) -> str:
    """Return a description of the values that a key accepts: all choices, or type and limits such as `number, > 0`."""
    if choices := get_args(key.type):
        return " | ".join(choices)
    kind = {bool: "true | false", int: "whole number", float: "number", str: "text"}[type(default_of(key))]
    limits = ((sign, key.metadata[name]) for name, (sign, _, _) in _LIMITS.items())
    return ", ".join([kind, *(f"{sign} {bound:g}" for sign, bound in limits if bound is not None)])


def unmet(key: str, value: Value, wanted: tuple[Value, ...] | Mapping[str, float]) -> str:
    """Return "" if `wanted` allows the `value` of `key`, or else a remedy such as `set alpha below 1`.

    `wanted` has the allowed values (if empty, all but 0 and ""), or limits such as `{"at_least": 0, "below": 1}`.
    """
    if isinstance(wanted, Mapping):
        met = all(_LIMITS[limit][1](value, bound) for limit, bound in wanted.items())
        words = " and".join(f" {_LIMITS[limit][2]} {bound:g}" for limit, bound in wanted.items())
    else:
        met = value in wanted if wanted else bool(value)
        words = f" = {' or '.join(map(str, wanted))}" if wanted else ""
    return "" if met else f"set {key}{words}"


def kebab(name: str) -> str:
    """Convert a field's name to a key: `local_epochs` to `local-epochs`."""
    return name.replace("_", "-")


def fits(number: int) -> bool:
    """Return whether a whole number has at most 64 bits, as TOML requires."""
    return -(2**63) <= number < 2**63


def checked(key: str, value: Any, spec: Field[Any]) -> Value:
    """Return `value` in the type of the key's dataclass field `spec`; raise a ConfigError if it is not accepted."""
    wanted = type(default_of(spec))
    if type(value) is int and not fits(value):
        raise ConfigError(f"{key}: must be a whole number of at most 64 bits, but has {value.bit_length()} bits")
    if (wanted is float and type(value) is int) or (wanted is str and type(value) in (int, float)):
        value = wanted(value)
    if must_be := _must_be(value, spec):
        raise ConfigError(f"{key} = {shown(value)}: must be {must_be}")
    return value


def _must_be(value: Any, spec: Field[Any]) -> str:
    wanted, choices = type(default_of(spec)), get_args(spec.type)
    if type(value) is not wanted:
        return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[wanted]
    if isinstance(value, str) and any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
        return "text without control characters"
    if choices and value not in choices:
        return f"one of {', '.join(choices)}"
    if isinstance(value, float) and not math.isfinite(value):
        return "finite"
    for limit, (_, holds, words) in _LIMITS.items():
        bound = spec.metadata[limit]
        if bound is not None and not holds(value, bound):
            return f"{words} {bound:g}"
    return ""

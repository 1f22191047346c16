"""A configuration key: a dataclass field with a default, a description, a subject and accepted values."""

import math
import operator
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field
from typing import Any, Literal

from fedhet.errors import ConfigError

Value = bool | int | float | str

About = Literal["data", "training", "optimiser", "server", "node", "place", "output"]

OwnPart = Literal["data", "model", "loader"]
"""What a user passes: data, models, or training examples in a DataLoader with another batch size than configured."""

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
    choices: tuple[str, ...] = (),
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
    at_need: tuple[Value, ...] = (),
) -> Any:
    """Return a dataclass field that is a configuration key.

    Args:
        default: the default value.
        help: a description in one line.
        choices: all accepted values, if there are few.
        at_least: smallest accepted number.
        above: exclusive lower limit.
        at_most: largest accepted number.
        below: exclusive upper limit.
        about: the subject: the clients' data (`data`), training (`training`, `optimiser`), waiting at the server
            (`server`), computing on a client's machine (`node`), where a run takes place (`place`), or its measurements
            (`output`). A comparison sets keys about data, place and output for all variants.
        at_node: a node may set it for itself.
        resumable: it may change when a run is resumed.
        path: it is a path, which only its own machine may choose.
        needs: other keys and the values with which this key has an effect, as a tuple or as limits (`{"below": 1}`); an
            empty tuple stands for all values except 0 and "".
        trait: the trait of a method (`Traits`) with which this key has an effect: true, or a tuple with its value.
        replaced_by: this key has no effect if the user passes all of these.
        at_need: values of a method's own key that `fedhet recommend` sets if the method cannot serve the clients
            otherwise.
    """
    limits = {"choices": choices, "at_least": at_least, "above": above, "at_most": at_most, "below": below}
    kind = {
        "about": about,
        "at_node": at_node,
        "resumable": resumable,
        "path": path,
        "needs": needs or {},
        "trait": trait,
        "replaced_by": replaced_by,
        "at_need": at_need,
    }
    return field(default=default, metadata={"help": help, **limits, **kind})


def default_of(key: Field[Value]) -> Value:
    """Return the default of a key."""
    assert key.default is not MISSING, f"option {key.name} needs a default"
    return key.default


def takes(key: Field[Any]) -> str:
    """Describe the values that a key accepts: its choices, or its type and limits."""
    if choices := key.metadata["choices"]:
        return " | ".join(choices)
    kind = {bool: "true | false", int: "whole number", float: "number", str: "text"}[type(default_of(key))]
    limits = ((sign, key.metadata[name]) for name, (sign, _, _) in _LIMITS.items())
    return ", ".join([kind, *(f"{sign} {bound:g}" for sign, bound in limits if bound is not None)])


def unmet(key: str, value: Value, wanted: tuple[Value, ...] | Mapping[str, float]) -> str:
    """Return how to set a key to one of the wanted values (`option(needs=...)`); empty if it has one."""
    if isinstance(wanted, Mapping):
        met = all(_LIMITS[limit][1](value, bound) for limit, bound in wanted.items())
        words = " and".join(f" {_LIMITS[limit][2]} {bound:g}" for limit, bound in wanted.items())
    else:
        met = value in wanted if wanted else bool(value)
        words = " =" * bool(wanted) + " or".join(f" {each}" for each in wanted)
    return "" if met else f"set {key}{words}"


def kebab(name: str) -> str:
    """Return a field's name as a key."""
    return name.replace("_", "-")


def fits(number: int) -> bool:
    """Return whether a whole number has at most 64 bits, as TOML requires."""
    return -(2**63) <= number < 2**63


def checked(key: str, value: Any, spec: Field[Any]) -> Value:
    """Return a key's value in the type of its default; raises a ConfigError that names accepted values."""
    wanted = type(default_of(spec))
    if type(value) is int and not fits(value):
        raise ConfigError(f"{key}: must be a whole number of at most 64 bits, not of {value.bit_length()}")
    if (wanted is float and type(value) is int) or (wanted is str and type(value) in (int, float)):
        value = wanted(value)
    if must_be := _must_be(value, spec):
        raise ConfigError(f"{key} = {value!r}: must be {must_be}")
    return value


def _must_be(value: Any, spec: Field[Any]) -> str:
    """Describe what the value must be; empty if the key accepts it."""
    wanted, choices = type(default_of(spec)), spec.metadata["choices"]
    if type(value) is not wanted:
        return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[wanted]
    if isinstance(value, str) and any(unicodedata.category(each) in ("Cc", "Cs") for each in value):
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

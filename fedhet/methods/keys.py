"""A key of a configuration: a dataclass field with default, meaning, subject and permitted values."""

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
"""Parts that a user supplies: data, models, and training examples in a DataLoader with another batch size."""

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
    """Make a dataclass field that is a configuration key.

    Args:
        default: its value unless another is chosen.
        help: its meaning.
        choices: its values, if they are few.
        at_least: the least of its values.
        above: they are greater.
        at_most: the greatest of them.
        below: they are less.
        about: which data clients have (`data`), what is computed (`training`; `optimiser`: how a step is made), how the
            server waits (`server`), how a client computes on its machine (`node`), where and how the run is carried out
            (`place`), or how it is measured and logged (`output`). A comparison sets what is about data, place and
            output for all variants.
        at_node: whether a node may set it for itself.
        resumable: whether it may change when a run is resumed.
        path: whether it becomes a path, which only its own machine may choose.
        needs: other keys with the values that give it an effect, listed or as limits (`{"below": 1}`); no values: any
            but 0 and "".
        trait: the trait of a method (`Traits`) that gives it an effect: true, or a list with its value.
        replaced_by: what a user supplies that takes its place, if all of it is supplied.
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
    """The default of a key."""
    assert key.default is not MISSING, f"option {key.name} needs a default"
    return key.default


def takes(key: Field[Any]) -> str:
    """The values that a key takes, in words: its choices, or its kind and limits."""
    if choices := key.metadata["choices"]:
        return " | ".join(choices)
    kind = {bool: "true | false", int: "whole number", float: "number", str: "text"}[type(default_of(key))]
    limits = ((sign, key.metadata[name]) for name, (sign, _, _) in _LIMITS.items())
    return ", ".join([kind, *(f"{sign} {bound:g}" for sign, bound in limits if bound is not None)])


def unmet(key: str, value: Value, wanted: tuple[Value, ...] | Mapping[str, float]) -> str:
    """Return how a key must be set to be as another key needs it (`option(needs=...)`), empty if it is so already."""
    if isinstance(wanted, Mapping):
        met = all(_LIMITS[limit][1](value, bound) for limit, bound in wanted.items())
        words = " and".join(f" {_LIMITS[limit][2]} {bound:g}" for limit, bound in wanted.items())
    else:
        met = value in wanted if wanted else bool(value)
        words = " =" * bool(wanted) + " or".join(f" {each}" for each in wanted)
    return "" if met else f"set {key}{words}"


def kebab(name: str) -> str:
    """A field's name as a key."""
    return name.replace("_", "-")


def fits(number: int) -> bool:
    """Whether a whole number is one of TOML's, of 64 bits."""
    return -(2**63) <= number < 2**63


def checked(key: str, value: Any, spec: Field[Any]) -> Value:
    """A key's value in the type of its default; a ConfigError, with what would be right, if it does not take it."""
    wanted = type(default_of(spec))
    if type(value) is int and not fits(value):
        raise ConfigError(f"{key}: is a whole number of {value.bit_length()} bits, must be of 64 at most")
    if (wanted is float and type(value) is int) or (wanted is str and type(value) in (int, float)):
        value = wanted(value)
    if must_be := _must_be(value, spec):
        raise ConfigError(f"{key} = {value!r}: must be {must_be}")
    return value


def _must_be(value: Any, spec: Field[Any]) -> str:
    """Name the property that a value lacks; empty if the key takes it."""
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

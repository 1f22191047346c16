"""The shapes of the values that a run directory's files must hold: a run directory is data, and may be anybody's."""

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from fedhet.text import all_printable


class Leaf(NamedTuple):
    """A value in words, and whether one is such a value."""

    words: str
    holds: Callable[[Any], bool]


class Maybe(NamedTuple):
    """A shape, or null."""

    shape: Any


class Either(NamedTuple):
    """An object of one shape, or else a value of another."""

    table: Any
    other: Any


Shape = Leaf | Maybe | Either | list[Any] | dict[str, Any]
"""`[shape]` is a list of values of one shape, `[shape, n]` one of at least n. An object has shapes by name: `name?` may
be missing, `*` is every name, and nobody reads names without a shape."""


def parsed(text: str, shape: Shape) -> Any:
    """Return the value of JSON text, its strings printable.

    Raises:
        ValueError: it is no JSON, or has another shape.
    """
    try:
        value = all_printable(json.loads(text))
        check(value, shape)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def check(value: Any, shape: Shape, place: str = "") -> None:
    """Check that a value, which stands in a named place, has a shape.

    Raises:
        ValueError: it has another.
    """
    if isinstance(shape, Leaf):
        if not shape.holds(value):
            raise ValueError(f"{place} must be {shape.words}" if place else f"{shape.words} was expected")
    elif isinstance(shape, Maybe):
        if value is not None:
            check(value, shape.shape, place)
    elif isinstance(shape, Either):
        check(value, shape.table if isinstance(value, dict) else shape.other, place)
    elif isinstance(shape, list):
        check(value, _LIST, place)
        if len(value) < sum(shape[1:]):
            raise ValueError(f"{place} must have at least {shape[1]}")
        for number, each in enumerate(value):
            check(each, shape[0], f"{place}[{number}]")
    else:
        check(value, _TABLE, place)
        for name, inner in shape.items():
            key = name.removesuffix("?")
            if key == name != "*" and key not in value:
                raise ValueError(f"{place}.{name} is missing" if place else f"{name} is missing")
            for each in value if name == "*" else {key} & value.keys():
                check(value[each], inner, f"{place}.{each}" if place else each)


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


ANYTHING = Leaf("anything", lambda value: True)
TEXT = Leaf("text", lambda value: isinstance(value, str))
WHOLE = Leaf("a whole number from 0 to 2^63", lambda value: type(value) is int and 0 <= value < 2**63)
NUMBER = Leaf("a number", _is_number)
FINITE = Leaf("a finite number", lambda value: _is_number(value) and math.isfinite(value))
TRUTH = Leaf("true or false", lambda value: isinstance(value, bool))
_TABLE = Leaf("an object", lambda value: isinstance(value, dict))
_LIST = Leaf("a list", lambda value: isinstance(value, list))

_SCORES = Maybe({"*": Maybe(NUMBER)})
_STATISTICS = Maybe(Either({"*": Maybe(NUMBER)}, NUMBER))
_EVALUATED = Maybe({"accuracy?": _STATISTICS, "loss?": _STATISTICS, "clients?": WHOLE})
_TESTED = Maybe({"received?": _EVALUATED, "trained?": _EVALUATED})
_WORK = {"private_steps?": WHOLE, "steps?": WHOLE, "forwards?": WHOLE}
_UNSEEN = {
    "own?": {"*": [_EVALUATED]},
    "common?": {"*": [_EVALUATED]},
    "clients?": {"*": {"architecture?": TEXT, "received?": [Maybe(NUMBER)], "scratch?": [Maybe(NUMBER)]}},
}

ROW: Shape = {
    "round": WHOLE,
    "participants": [TEXT],
    "failures": [{"client?": TEXT, "reason?": TEXT}],
    "bytes_up": WHOLE,
    "bytes_down": WHOLE,
    "timing": {"seconds": FINITE},
    "final?": TRUTH,
    "received?": _EVALUATED,
    "trained?": _EVALUATED,
    "common?": _TESTED,
    "validation?": _TESTED,
    "unseen_clients?": Maybe(_UNSEEN),
    "train_loss?": Maybe(NUMBER),
    "metrics?": _SCORES,
    "work?": _WORK,
}
"""A line of `history.jsonl`."""

SUMMARY: Shape = {
    **dict.fromkeys(("method?", "dataset?", "engine?", "metric?", "status?", "error?"), TEXT),
    **dict.fromkeys(("clients?", "rounds?", "seed?", "bytes_up?", "bytes_down?", "failures?"), WHOLE),
    **{f"{which}_accuracy?": _SCORES for which in ("personal", "received", "trained", "global", "validation")},
    "devices?": Maybe([TEXT]),
    "personal?": Maybe(Leaf("received or trained", lambda value: value in ("received", "trained"))),
    "last10?": Maybe({"*": _SCORES}),
    "examples?": {"*": WHOLE},
    "work?": _WORK,
    "seconds?": FINITE,
    "stopped_early?": Maybe(WHOLE),
    "common?": _TESTED,
    "unseen_clients?": {"received_accuracy": [Maybe(NUMBER), 1], "scratch_accuracy": [Maybe(NUMBER), 1]},
}
"""The content of `summary.json`."""

MATRICES: Shape = {"*": ANYTHING}
"""The content of `matrices.json`: the method knows what is in each."""

PARTITION: Shape = {"clients": [TEXT], "classes": [ANYTHING], "examples": [[WHOLE]]}
"""The content of `partition.json`."""

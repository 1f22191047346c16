"""The shapes of the values that a run directory's files must hold: a run directory is data, and may be anybody's."""

import json
import math
from collections.abc import Callable
from typing import Any

from fedhet.text import all_printable

Check = Callable[[str, Any], None]
"""Raises `ValueError` where a value, which stands in a named place, has another shape."""


def parsed(text: str, check: Check) -> Any:
    """Return what JSON text holds, its strings printable.

    Raises:
        ValueError: it is no JSON, or has another shape.
    """
    try:
        value = all_printable(json.loads(text))
        check("", value)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _of(words: str, holds: Callable[[Any], bool]) -> Check:
    def check(place: str, value: Any) -> None:
        if not holds(value):
            raise ValueError(f"{place} must be {words}" if place else f"{words} was expected")

    return check


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


ANYTHING = _of("anything", lambda value: True)
TEXT = _of("text", lambda value: isinstance(value, str))
WHOLE = _of("a whole number from 0 to 2^63", lambda value: type(value) is int and 0 <= value < 2**63)
NUMBER = _of("a number", _is_number)
FINITE = _of("a finite number", lambda value: _is_number(value) and math.isfinite(value))
TRUTH = _of("true or false", lambda value: isinstance(value, bool))
_TABLE = _of("an object", lambda value: isinstance(value, dict))
_LIST = _of("a list", lambda value: isinstance(value, list))


def maybe(inner: Check) -> Check:
    """A shape, or null."""

    def check(place: str, value: Any) -> None:
        if value is not None:
            inner(place, value)

    return check


def many(inner: Check, least: int = 0) -> Check:
    """A list of values of one shape."""

    def check(place: str, value: Any) -> None:
        _LIST(place, value)
        if len(value) < least:
            raise ValueError(f"{place} must have at least {least}")
        for number, each in enumerate(value):
            inner(f"{place}[{number}]", each)

    return check


def by_name(inner: Check) -> Check:
    """An object whose values have one shape."""

    def check(place: str, value: Any) -> None:
        _TABLE(place, value)
        for name, each in value.items():
            inner(f"{place}.{name}" if place else name, each)

    return check


def either(table: Check, other: Check) -> Check:
    """An object of one shape, or else a value of another."""

    def check(place: str, value: Any) -> None:
        (table if isinstance(value, dict) else other)(place, value)

    return check


def fields(needed: dict[str, Check], others: dict[str, Check]) -> Check:
    """An object with these fields; it may hold more, which nobody reads."""

    def check(place: str, value: Any) -> None:
        _TABLE(place, value)
        for name, inner in {**needed, **others}.items():
            if name in value:
                inner(f"{place}.{name}" if place else name, value[name])
            elif name in needed:
                raise ValueError(f"{place}.{name} is missing" if place else f"{name} is missing")

    return check


_STATISTICS = maybe(either(by_name(maybe(NUMBER)), NUMBER))
_EVALUATED = maybe(fields({}, {"accuracy": _STATISTICS, "loss": _STATISTICS, "clients": WHOLE}))
_TESTED = maybe(fields({}, {"received": _EVALUATED, "trained": _EVALUATED}))
_WORK = fields({}, dict.fromkeys(("private_steps", "steps", "forwards"), WHOLE))
_BY_START = by_name(many(_EVALUATED))
_ONE_UNSEEN = fields({}, {"architecture": TEXT} | dict.fromkeys(("received", "scratch"), many(maybe(NUMBER))))

ROW = fields(
    {
        "round": WHOLE,
        "participants": many(TEXT),
        "failures": many(fields({}, {"client": TEXT, "reason": TEXT})),
        "bytes_up": WHOLE,
        "bytes_down": WHOLE,
        "timing": fields({"seconds": FINITE}, {}),
    },
    {
        "final": TRUTH,
        "received": _EVALUATED,
        "trained": _EVALUATED,
        "common": _TESTED,
        "validation": _TESTED,
        "unseen_clients": maybe(fields({}, {"own": _BY_START, "common": _BY_START, "clients": by_name(_ONE_UNSEEN)})),
        "train_loss": maybe(NUMBER),
        "metrics": maybe(by_name(maybe(NUMBER))),
        "work": _WORK,
    },
)
"""A line of `history.jsonl`."""

_SCORES = maybe(by_name(maybe(NUMBER)))
_PERSONAL = maybe(_of("received or trained", lambda value: value in ("received", "trained")))
_UNSEEN = fields(dict.fromkeys(("received_accuracy", "scratch_accuracy"), many(maybe(NUMBER), 1)), {})

SUMMARY = fields(
    {},
    {
        **dict.fromkeys(("method", "dataset", "engine", "metric", "status", "error"), TEXT),
        **dict.fromkeys(("clients", "rounds", "bytes_up", "bytes_down", "failures"), WHOLE),
        **{f"{kind}_accuracy": _SCORES for kind in ("personal", "received", "trained", "global", "validation")},
        "seed": WHOLE,
        "devices": maybe(many(TEXT)),
        "personal": _PERSONAL,
        "last10": maybe(by_name(_SCORES)),
        "examples": by_name(WHOLE),
        "work": _WORK,
        "seconds": FINITE,
        "stopped_early": maybe(WHOLE),
        "common": _TESTED,
        "unseen_clients": _UNSEEN,
    },
)
"""What `summary.json` holds."""

MATRICES = by_name(ANYTHING)
"""What `matrices.json` holds: the method knows what is in each."""

PARTITION = fields({"clients": many(TEXT), "classes": many(ANYTHING), "examples": many(many(WHOLE))}, {})
"""What `partition.json` holds."""

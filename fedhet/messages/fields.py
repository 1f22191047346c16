"""Checked access to the fields of a received record; all types, ranges and lengths are checked here."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Annotated, Any

from fedhet.messages.arrays import WireError
from fedhet.methods.keys import kebab
from fedhet.tasks import LARGEST
from fedhet.utils.files import LONGEST_NAME, TAKEN_NAMES, plain_name

Name = Annotated[str, "can be the name of a file"]
"""The type of a dataclass field that `Fields.name` reads."""

LONGEST = 200
"""Largest number of characters of a received name."""

MOST_IN_A_LIST = 2**16
"""Largest number of entries of a received list."""


class Fields:
    """The fields of a received record, or of a method's values; each is checked when it is read.

    Every method raises a WireError for an invalid field, which names the field and its record (`where`).
    """

    def __init__(self, fields: Mapping[str, Any], where: str = "its reply") -> None:
        self._fields, self._where = fields, where

    def __contains__(self, key: str) -> bool:
        """Return whether the field exists."""
        return key in self._fields

    def plain(self, dataclass: Any) -> dict[str, Any]:
        """Read the fields of a dataclass: lines, names, counts (within the limits in their metadata) and flags."""
        readers: dict[Any, Any] = {str: self.line, Name: self.name, int: self.count, bool: self.flag}
        values = {}
        for each, key in named_fields(dataclass):
            if each.type in readers and (key in self._fields or each.default is MISSING):
                default = None if each.default is MISSING else each.default
                values[each.name] = readers[each.type](key, default, **each.metadata)
        return values

    def text(self, key: str, default: str | None = None, *, longest: int = LONGEST) -> str:
        """Read text of a bounded length; without a default it must exist."""
        right = f"text of at most {longest} characters"
        return str(self._read(key, default, lambda value: isinstance(value, str) and len(value) <= longest, right))

    def line(self, key: str, default: str | None = None) -> str:
        """Read printable text of one line."""
        self.text(key, default)
        return str(self._read(key, default, str.isprintable, "printable text of one line"))

    def name(self, key: str, default: str | None = None) -> str:
        """Read text that can name a file, or is the default."""
        self.text(key, default)
        right = (
            f"a name that a file can have: printable, of at most {LONGEST_NAME} bytes, without slashes, not hidden, "
            f"and not one of {', '.join(sorted(TAKEN_NAMES))}"
        )
        return str(self._read(key, default, lambda value: value == default or plain_name(value), right))

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Read true or false."""
        return bool(self._read(key, default, lambda value: isinstance(value, bool), "true or false"))

    def count(self, key: str, default: int | None = None, *, at_least: int = 0, at_most: int = 2**53) -> int:
        """Read a whole number in a range, or the default."""
        least = at_least if default is None else min(at_least, default)
        right = f"a whole number from {at_least} to {at_most}"
        return int(self._read(key, default, lambda value: _is_count(value, least, at_most), right))

    def number(self, key: str, default: float | None = None) -> float:
        """Read a number up to `LARGEST`; larger numbers come from diverged training."""

        def good(value: Any) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST

        return float(self._read(key, default, good, f"a number up to {LARGEST:.0e}: has training diverged?"))

    def counts(self, key: str, *, at_most: int = 2**53) -> list[int]:
        """Read a list of whole numbers from 0."""

        def good(value: Any) -> bool:
            short = isinstance(value, list) and len(value) <= MOST_IN_A_LIST
            return short and all(_is_count(each, 0, at_most) for each in value)

        right = f"a list of at most {MOST_IN_A_LIST} whole numbers from 0 to {at_most}"
        return list(self._read(key, None, good, right))

    def _read(self, key: str, default: Any, good: Callable[[Any], bool], right: str) -> Any:
        if key not in self._fields and default is None:
            raise WireError(f"{self._where} is damaged: {key} is missing")
        value = self._fields.get(key, default)
        if not good(value):
            raise WireError(f"{self._where} is damaged: {key} is {shortened(value)}, must be {right}")
        return value


@cache
def named_fields(dataclass: Any) -> list[tuple[Field[Any], str]]:
    """Return the fields of a class with their names in messages."""
    return [(each, kebab(each.name)) for each in fields(dataclass)]


def shortened(value: object) -> str:
    """Return the first hundred characters of a received value for an error, without formatting all of it."""
    shown = repr(value[:100] if isinstance(value, str | bytes | list) else value)
    return shown if len(shown) <= 100 else shown[:100] + "..."


def _is_count(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

"""Checked access to the fields of a received record: types, ranges and lengths are checked here."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Annotated, Any

from fedhet.messages.arrays import WireError
from fedhet.methods.keys import kebab
from fedhet.tasks import LARGEST
from fedhet.utils.files import LONGEST_NAME, TAKEN_NAMES, plain_name

Name = Annotated[str, "can be the name of a file"]
Text = Annotated[str, "has several lines"]
"""Types of dataclass fields that `Fields.name` and `Fields.text` read; `Fields.line` reads those of type `str`."""

LONGEST = 200
"""Largest number of characters of a received name."""

_FILE_NAME = (
    f"a name that a file can have: printable, of at most {LONGEST_NAME} bytes, without slashes, not hidden, and not "
    f"one of {', '.join(sorted(TAKEN_NAMES))}"
)

MOST_IN_A_LIST = 2**16
"""Largest number of entries of a received list."""


class Fields:
    """The fields of a received record, such as a reply's values; each field is checked when it is read.

    The methods that read a field raise a WireError if it is invalid, which names the field and the record (`where`).
    """

    def __init__(self, fields: Mapping[str, Any], where: str = "the client's reply") -> None:
        self._fields, self._where = fields, where

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def plain(self, dataclass: Any) -> dict[str, Any]:
        """Read the text, number and boolean fields of `dataclass`, and check the limits in their metadata."""
        values = {}
        for each, key in named_fields(dataclass):
            if key in self._fields or each.default is MISSING:
                default = None if each.default is MISSING else each.default
                limits = {name: limit for name, limit in each.metadata.items() if name != "key"}
                values[each.name] = getattr(self, READERS[each.type])(key, default, **limits)
        return values

    def text(self, key: str, default: str | None = None, *, longest: int = LONGEST) -> str:
        """Read text of at most `longest` characters; a field without a default must exist."""
        right = f"text of at most {longest} characters"
        return str(self._read(key, default, lambda value: isinstance(value, str) and len(value) <= longest, right))

    def line(self, key: str, default: str | None = None) -> str:
        """Read printable text of one line."""
        self.text(key, default)
        return str(self._read(key, default, str.isprintable, "printable text of one line"))

    def name(self, key: str, default: str | None = None) -> str:
        """Read text that is a valid file name, or the default."""
        self.text(key, default)
        return str(self._read(key, default, lambda value: value == default or plain_name(value), _FILE_NAME))

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Read a boolean."""
        return bool(self._read(key, default, lambda value: isinstance(value, bool), "true or false"))

    def count(self, key: str, default: int | None = None, *, at_least: int = 0, at_most: int = 2**53) -> int:
        """Read a whole number from `at_least` to `at_most`, or the default."""
        least = at_least if default is None else min(at_least, default)
        right = f"a whole number from {at_least} to {at_most}"
        return int(self._read(key, default, lambda value: _is_count(value, least, at_most), right))

    def number(self, key: str, default: float | None = None) -> float:
        """Read a number of at most `LARGEST` in absolute value; larger numbers come from diverged training."""

        def good(value: Any) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST

        return float(self._read(key, default, good, f"a number up to {LARGEST:.0e}: has training diverged?"))

    def counts(self, key: str, *, at_most: int = 2**53) -> list[int]:
        """Read a list of whole numbers from 0 to `at_most`."""

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
            raise WireError(f"{self._where} is damaged: {key} is {shortened(value)}, but must be {right}")
        return value


READERS: dict[Any, str] = {
    **{str: "line", Name: "name", Text: "text", int: "count", bool: "flag", float: "number"},
    float | None: "number",
}
"""The method of `Fields` that reads a dataclass field, by type; fields of other types are not plain."""


@cache
def named_fields(dataclass: Any) -> list[tuple[Field[Any], str]]:
    """Return the fields of a dataclass that are text, numbers or booleans, each with its key in messages."""
    plain = [each for each in fields(dataclass) if each.type in READERS]
    return [(each, each.metadata.get("key", kebab(each.name))) for each in plain]


def written(record: Any) -> dict[str, Any]:
    """Return the text, number and boolean fields of a dataclass object by key, without default values."""
    kind: Any = type(record)
    values = {key: (getattr(record, each.name), each.default) for each, key in named_fields(kind)}
    return {key: value for key, (value, default) in values.items() if value != default}


def shortened(value: object) -> str:
    """Return at most the first hundred characters of a received value, for an error message."""
    shown = repr(value[:100] if isinstance(value, str | bytes | list) else value)
    return shown if len(shown) <= 100 else shown[:100] + "..."


def _is_count(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

"""Checked access to the fields of a received record: the one place that checks types, ranges and lengths."""

from collections.abc import Mapping
from typing import Any

from fedhet.files import LONGEST_NAME, TAKEN_NAMES, plain_name
from fedhet.task import LARGEST
from fedhet.wire.arrays import WireError

LONGEST = 200
"""Characters of a name that came."""

MOST_IN_A_LIST = 2**16
"""Entries of a list that came: the layers of a network and the edges between them, the slots of a block."""


class Told:
    """The fields of a record that came, or of a method's own values; each is checked as it is read.

    Args:
        fields: by key, of whatever types.
        where: names the record in errors.

    Raises:
        WireError: by every method, for a field that is not what it must be; naming it.
    """

    def __init__(self, fields: Mapping[str, Any], where: str = "its reply") -> None:
        self._fields, self._where = fields, where

    def __contains__(self, key: str) -> bool:
        """Whether there is such a field."""
        return key in self._fields

    def text(self, key: str, default: str | None = None, *, longest: int = LONGEST) -> str:
        """Text of a bounded length; must be there unless there is a default."""
        value = self._get(key, default)
        if not isinstance(value, str) or len(value) > longest:
            raise self._wrong(key, value, f"text of at most {longest} characters")
        return value

    def line(self, key: str, default: str | None = None) -> str:
        """Printable text of one line."""
        value = self.text(key, default)
        if not value.isprintable():
            raise self._wrong(key, value, "printable text of one line")
        return value

    def name(self, key: str, default: str | None = None) -> str:
        """Text that can be a file's name, or the default."""
        value = self.text(key, default)
        if value != default and not plain_name(value):
            raise self._wrong(
                key,
                value,
                f"a name that can be that of a file: printable, of at most {LONGEST_NAME} bytes, without slashes, not "
                f"hidden, and not one of {', '.join(sorted(TAKEN_NAMES))}",
            )
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def count(self, key: str, default: int | None = None, *, at_least: int = 0, at_most: int = 2**53) -> int:
        """A whole number in a range."""
        value = self._get(key, default)
        if not _is_count(value) or not (at_least <= value <= at_most or value == default):
            raise self._wrong(key, value, f"a whole number from {at_least} to {at_most}")
        return int(value)

    def counts(self, key: str, *, at_most: int = 2**53) -> list[int]:
        """A list of whole numbers from 0."""
        value = self._list(key)
        if not all(_is_count(each) and 0 <= each <= at_most for each in value):
            raise self._wrong(key, value, f"a list of whole numbers from 0 to {at_most}")
        return list(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A number of a size that training which has not diverged comes to."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
            raise self._wrong(key, value, f"a number up to {LARGEST:.0e}: has training diverged?")
        return float(value)

    def texts(self, key: str, *, longest: int = LONGEST) -> list[str]:
        """A list of printable texts, each of a bounded length."""
        value = self._list(key)
        if not all(isinstance(each, str) and len(each) <= longest and each.isprintable() for each in value):
            raise self._wrong(key, value, f"a list of printable texts of at most {longest} characters")
        return list(value)

    def _list(self, key: str) -> list[Any]:
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) > MOST_IN_A_LIST:
            raise self._wrong(key, value, f"a list of at most {MOST_IN_A_LIST}")
        return value

    def _get(self, key: str, default: Any) -> Any:
        if key not in self._fields and default is None:
            raise WireError(f"{self._where} is damaged: {key} is missing")
        return self._fields.get(key, default)

    def _wrong(self, key: str, value: object, right: str) -> WireError:
        return WireError(f"{self._where} is damaged: {key} is {shortened(value)}, must be {right}")


def shortened(value: object) -> str:
    """A value that came, to be shown in an error: its first hundred characters, found without writing all of it."""
    if isinstance(value, str | bytes | list):
        more, value = len(value) > 100, value[:100]
    else:
        more = False
    shown = repr(value)
    return shown if len(shown) <= 100 and not more else shown[:100] + "..."


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

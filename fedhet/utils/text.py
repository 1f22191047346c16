"""Make untrusted text safe for terminals, logs and spreadsheets."""

import contextlib
import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

FORMULA = tuple("=+-@＝＋－＠")
"""Characters with which a formula begins in a spreadsheet."""


def printable(text: str, *, keep: str = "") -> str:
    r"""Escape invisible characters, such as `\x1b` and `\u202e`, except those to `keep`."""
    if text.isprintable():
        return text
    shown = (char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text)
    return "".join(shown)


def all_printable(value: Any) -> Any:
    """Apply `printable` to all text, including keys, of a JSON or TOML value."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(key): all_printable(each) for key, each in value.items()}
    return [all_printable(each) for each in value] if isinstance(value, list) else value


def cell(value: object) -> object:
    """Return a value as a cell of a CSV file: printable, with an apostrophe before text that would be a formula."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    with contextlib.suppress(ValueError):
        float(text)
        return text
    return f"'{text}" if text.startswith(FORMULA) else text


def console(**options: Any) -> "Console":
    """Return a console of rich with these options that prints `[red]` and `:smile:` as they are."""
    from rich.console import Console

    return Console(**options, highlight=False, markup=False, emoji=False)


def terminal() -> "Console":
    """Return a console on standard output that wraps lines on a terminal only."""
    return console(soft_wrap=not sys.stdout.isatty())


class PrintableLog(logging.Filter):
    """Make a logger's messages printable, since they contain names and reasons that clients send."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Format the message, and keep every record."""
        record.msg, record.args = printable(record.getMessage(), keep="\n\t"), None
        return True


log = logging.getLogger("flwr").getChild("fedhet")
"""fedhet's logger, a child of Flower's."""
log.addFilter(PrintableLog())

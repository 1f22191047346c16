"""Makes untrusted text safe for terminals, logs and tables that a spreadsheet opens."""

import contextlib
import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

FORMULA = tuple("=+-@＝＋－＠")
"""A cell of a table that begins so is a formula to a spreadsheet."""


def printable(text: str, *, keep: str = "") -> str:
    r"""Return the text with invisible characters, but for those to `keep`, as escapes such as `\x1b` and `\u202e`."""
    if text.isprintable():
        return text
    shown = (char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text)
    return "".join(shown)


def all_printable(value: Any) -> Any:
    """Return a JSON or TOML value with all its text, keys included, as `printable` gives it."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(key): all_printable(each) for key, each in value.items()}
    return [all_printable(each) for each in value] if isinstance(value, list) else value


def cell(value: object) -> object:
    """Return a value as a cell of a CSV file: printable, and text that would be a formula behind an apostrophe."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    with contextlib.suppress(ValueError):
        float(text)
        return text
    return f"'{text}" if text.startswith(FORMULA) else text


def console(**options: Any) -> "Console":
    """Return a console of rich, with these options, that prints text as it is: `[red]` and `:smile:` are no markup."""
    from rich.console import Console

    return Console(**options, highlight=False, markup=False, emoji=False)


def terminal() -> "Console":
    """Return a console on standard output, whose lines are wrapped on a terminal only."""
    return console(soft_wrap=not sys.stdout.isatty())


class PrintableLog(logging.Filter):
    """Makes messages of a logger printable, whose arguments are names and reasons that clients send."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Format the message; no record is dropped."""
        record.msg, record.args = printable(record.getMessage(), keep="\n\t"), None
        return True


log = logging.getLogger("flwr").getChild("fedhet")
"""fedhet's messages, which are at the level of Flower's."""
log.addFilter(PrintableLog())

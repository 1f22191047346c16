"""Functions that make untrusted text safe for terminals, logs and spreadsheets."""

import contextlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def printable(text: str, *, keep: str = "") -> str:
    r"""Return a text with invisible characters, except those in `keep`, escaped as `\x1b` or `\u202e`."""
    if text.isprintable():
        return text
    shown = (char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text)
    return "".join(shown)


def counted(number: int, noun: str) -> str:
    """Return a number and a noun, in the plural unless the number is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def all_printable(value: Any) -> Any:
    """Return a JSON or TOML value in which invisible characters of all text, including keys, are escaped."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(key): all_printable(item) for key, item in value.items()}
    return [all_printable(item) for item in value] if isinstance(value, list) else value


def cell(value: object) -> object:
    """Return a value for a CSV cell: invisible characters are escaped, and a formula gets a leading apostrophe."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    with contextlib.suppress(ValueError):
        float(text)
        return text
    return f"'{text}" if text.startswith(tuple("=+-@＝＋－＠")) else text


def console(**options: Any) -> "Console":
    """Return a `rich` console with the given options that prints text literally, without markup and emoji codes."""
    from rich.console import Console

    return Console(**options, highlight=False, markup=False, emoji=False)


def terminal() -> "Console":
    """Return a console for standard output, which wraps lines only if the output is a terminal."""
    return console(soft_wrap=sys.stdout is None or not sys.stdout.isatty())


class PrintableLog(logging.Filter):
    """Logging filter that makes messages printable, since they contain names and errors that clients send."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Format and escape the message and traceback of a record; no record is dropped."""
        # Further lines are indented, since text of others could look like a line of the log.
        record.msg = printable(record.getMessage(), keep="\n\t").replace("\n", "\n    ")
        record.args = None
        if record.exc_info:  # it is cut, since an error can quote long text
            text = logging.Formatter().formatException(record.exc_info)[:20_000]
            record.exc_text = indent(printable(text, keep="\n\t"), "    ")
        return True


log = logging.getLogger("flwr").getChild("fedhet")
"""fedhet's logger, a child of Flower's."""
log.addFilter(PrintableLog())


@lru_cache(maxsize=8)
def log_once(app: object, reason: str) -> None:
    """Log the error message `reason`, unless it was logged for this ClientApp or ServerApp before."""
    log.error("%s", reason)


def traceback_in_file(error: BaseException, doing: str) -> str:
    """Append the failed action `doing` and an error's traceback to `~/.fedhet/clients.log`; return a short message."""
    path = Path(os.path.expanduser("~/.fedhet/clients.log"))
    line = printable(" ".join(f"{type(error).__name__}: {error}".split()))[:500]
    try:
        path.parent.mkdir(parents=path.is_absolute(), exist_ok=True)  # not in a folder named ~
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {doing}\n{''.join(traceback.format_exception(error))}\n")
    except OSError:
        return line
    return f"{line} (traceback in {path})"


__version__ = "0.1.0"

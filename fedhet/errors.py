"""Errors that are messages for people: the command line prints them without a traceback and exits with code 2."""

from collections.abc import Iterable
from difflib import get_close_matches


class FedhetError(Exception):
    """An error that the user can correct; the message says what was wrong, where, and what would be right."""


class ConfigError(FedhetError):
    """A configuration that cannot be run: unknown key, wrong type or range, settings that contradict each other."""


class DataError(FedhetError):
    """Data that is missing or damaged, or that cannot be shared out as asked."""


class ModelError(FedhetError, ValueError):
    """A model that does not exist or does not fit its data or method."""


MOST, NEIGHBOURS = 20, 5
"""So many known names are all named; of more only the nearest."""


def nearest(kind: str, name: str, known: Iterable[str]) -> str:
    """Return a message about an unknown name, with the nearest known name and the known names (or neighbours).

    Returns:
        Such as `unknown model 'cnn33'; did you mean 'cnn-3-3'? known: cnn, cnn-3-3, mlp`, `model` being the kind.
    """
    names = sorted({*known})
    close = get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    shown = names if len(names) <= MOST else get_close_matches(name, names, n=NEIGHBOURS, cutoff=0.4)
    rest = len(names) - len(shown)
    listed = ", ".join(shown) + (" and " * bool(shown) + f"{rest} others" if rest else "")
    return f"unknown {kind} {name!r}{hint} known: {listed or 'none'}"

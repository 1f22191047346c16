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


def check_kinds(**arguments: tuple[object, tuple[type, ...]]) -> None:
    """Raise a ConfigError if an argument, given with the classes that it may be of, is of none and not None."""
    for name, (value, kinds) in arguments.items():
        if value is not None and not isinstance(value, kinds):
            words = ", ".join({"str": "a text", "Mapping": "a dict"}.get(k.__name__, f"a {k.__name__}") for k in kinds)
            raise ConfigError(f"{name} = {value!r} is a {type(value).__name__}: must be {words}")


def check_list(name: str, value: object, kind: type, example: str) -> None:
    """Raise a ConfigError unless an argument is a list of values of a class."""
    if isinstance(value, str) or not isinstance(value, Iterable) or not all(isinstance(each, kind) for each in value):
        raise ConfigError(f"{name} = {value!r}: must be a list, such as {example}")


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

"""Errors that are messages for people: the command line prints them without a traceback and exits with code 2."""

import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class FedhetError(Exception):
    """An error that the user can correct; the message says what was wrong, where, and what would be right.

    Attributes:
        may_pass: whether the same can succeed later, such as reading from a network share; a client with such an error
            in its handshake is asked again.
    """

    may_pass = False


class ConfigError(FedhetError):
    """A configuration that cannot be run: unknown key, wrong type or range, settings that contradict each other."""


class DataError(FedhetError):
    """Data that is missing or damaged, or that cannot be shared out as asked."""


class ModelError(FedhetError, ValueError):
    """A model that does not exist or does not fit its data or method."""


class UserCodeError(DataError, ModelError):
    """An exception that a user's function or dataset raised; the message names its file and line."""

    may_pass = True

    @classmethod
    def of(cls, error: BaseException, doing: str, after: str = "") -> "UserCodeError":
        """Return the error for an exception that was raised while `doing` something; `after` ends the message."""
        frames = traceback.extract_tb(error.__traceback__)
        own = next((each for each in frames if not Path(each.filename).is_relative_to(Path(__file__).parent)), None)
        where = f" ({Path(own.filename).name}, line {own.lineno})" if own else ""
        return cls(f"{doing} raised {type(error).__name__}: {error}{where}{after}")


def in_words(error: OSError) -> str:
    """Return which file cannot be read or written, and why."""
    if error.filename is None:
        return f"{type(error).__name__}: {error.strerror or error}"
    return f"{error.filename} cannot be written or read: {error.strerror or error}"


def check_kinds(**arguments: tuple[object, tuple[type, ...]]) -> None:
    """Raise a ConfigError for an argument of none of the classes that are given with it; None is accepted."""
    for name, (value, kinds) in arguments.items():
        if value is not None and not isinstance(value, kinds):
            named = {
                "str": "a text",
                "Mapping": "a dict",
                "int": "a whole number",
                "Sequence": "a list",
                "Path": "a path",
            }
            words = " or ".join(named.get(kind.__name__, f"a {kind.__name__}") for kind in kinds)
            raise ConfigError(f"{name} = {value!r}: must be {words}")


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

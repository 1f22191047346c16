"""Exceptions with messages for users, which the command line prints without a traceback."""

import json
import re
import reprlib
import sysconfig
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_OURS = [_ROOT / each for each in ("fedhet", "client_apps", "strategies")]
_LIBRARIES = [Path(sysconfig.get_path(each)) for each in ("stdlib", "purelib", "platlib")]

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 200
shown = _repr.repr
"""Function that returns a short text for any value, even if its `repr` is long or raises an exception."""


class FedhetError(Exception):
    """An error that the user can correct; the message says what is wrong, where, and what to do.

    `may_pass` is True if a second attempt may succeed, for example after a failure to read a network share.
    """

    may_pass = False


class Refused(FedhetError):
    """A node's refusal of a request; the message discloses nothing about the node's private data."""


class ConfigError(FedhetError):
    """An invalid configuration: an unknown key, a wrong type or value, or settings that contradict each other."""


class DataError(FedhetError):
    """Data that is missing or damaged, or that cannot be distributed as configured."""


class ModelError(FedhetError, ValueError):
    """A model that does not exist, or that does not suit its data or method."""


class WriteError(OSError):
    """A file of a run that cannot be written, such as on a full disk; it ends a simulation."""


class UserCodeError(DataError, ModelError):
    """An exception that a user's function or dataset raised; the message names its file and line."""

    may_pass = True

    @classmethod
    def of(cls, error: BaseException, doing: str, after: str = "") -> "UserCodeError":
        """Create the error from a user's exception, with a message such as `{doing} raised KeyError: 1{after}`."""
        frames = _users(error)
        # cloudpickle, which sends a script's functions to other processes, does not keep their file.
        file = Path(frames.filename).name.replace("<dynamic-code>", f"the function {frames.name}") if frames else ""
        where = f" ({file}, line {frames.lineno})" if frames else ""
        return cls(f"{doing} raised {type(error).__name__}: {error}{where}{after}")

    @classmethod
    def within(cls, error: Exception) -> Exception:
        """Return a UserCodeError for an exception that the user's code raised, and any other exception unchanged."""
        frames = None if isinstance(error, FedhetError | OSError) else _users(error)
        return cls.of(error, f"the client's {frames.name}") if frames else error


def _users(error: BaseException) -> traceback.FrameSummary | None:
    """Return the last frame of an exception's traceback that is in the user's code, or None."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    others = [*_OURS, *_LIBRARIES]
    return next((frame for frame in frames if not any(map(Path(frame.filename).is_relative_to, others))), None)


def in_words(error: OSError) -> str:
    """Return a text that says which file caused an OSError, and why."""
    if error.filename is None:
        return str(error) if isinstance(error, WriteError) else f"{type(error).__name__}: {error.strerror or error}"
    return f"{error.filename} cannot be written or read: {error.strerror or error}"


def damage(error: Exception) -> str:
    """Return a text that says what is wrong in a damaged file, given the exception that its content raised."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    worded = isinstance(error, FedhetError | json.JSONDecodeError)
    return str(error) if worded else "a value is not of the kind that a run writes"


# Descriptions of classes in messages.
KINDS = {"str": "a text", "Mapping": "a dict", "int": "a whole number", "float": "a number", "Path": "a path"}
LISTED = {"int": "whole numbers", "str": "texts", "object": "values"}


def check_kinds(**arguments: tuple[object, tuple[type, ...]]) -> None:
    """Check that each value in `name=(value, classes)` is None or of one of the classes; else raise a ConfigError."""
    for name, (value, kinds) in arguments.items():
        if value is not None:
            check_kind(name, value, kinds)
        if isinstance(value, str | Path) and "\0" in str(value):
            raise ConfigError(f"{name} = {shown(value)}: must not contain the character NUL: remove it")


def check_kind(name: str, value: object, kinds: tuple[type, ...]) -> None:
    """Check that the argument `name` is of one of the classes; else raise a ConfigError."""
    if not isinstance(value, kinds):
        words = " or ".join(KINDS.get(kind.__name__, f"a {kind.__name__}") for kind in kinds)
        raise ConfigError(f"{name} = {shown(value)}: must be {words}")


def check_list(name: str, value: object, kind: type, example: str) -> None:
    """Check that the argument `name` is a list of instances of `kind`; else raise a ConfigError with an `example`."""
    if isinstance(value, str) or not isinstance(value, Iterable) or not all(isinstance(item, kind) for item in value):
        words = LISTED.get(kind.__name__, f"instances of {kind.__name__}")
        raise ConfigError(f"{name} = {shown(value)}: must be a list of {words}, such as {example}")


def nearest(kind: str, name: str, known: Iterable[str]) -> str:
    """Return an error message such as `unknown {kind} '{name}'; did you mean 'cnn-3-3'? known: cnn, ...`.

    It lists all `known` names, or the five nearest, first the nearest, if there are more than 20.
    """
    names = sorted({*known})
    short = [
        candidate for candidate in names if name == "".join(word[0] for word in re.split(r"[-.]+", candidate) if word)
    ]
    close = [*short, *get_close_matches(name, names, n=1)]
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    listed = ", ".join(names) or "none"
    if len(names) > 20:
        shown = [*dict.fromkeys([*short, *get_close_matches(name, names, n=5, cutoff=0)])][:5]
        listed = f"{', '.join(shown)} and {len(names) - 5} others"
    return f"unknown {kind} {name!r}{hint} known: {listed}"

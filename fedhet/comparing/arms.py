"""The arms of a comparison: methods, or variants of one with settings of their own."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedhet import config as configuration
from fedhet import registry
from fedhet.comparing.cases import PLACES
from fedhet.config import Value
from fedhet.errors import ConfigError

GIVEN = PLACES | {
    *("method", "seed", "preset", "dataset", "data", "partition", "classes-per-client", "alpha", "samples-per-client"),
    *("clients", "public-samples", "validation", "early-stopping", "test-on", "input-size"),
}
"""What a comparison is about: it is the same for all arms."""

_NAMED = re.compile(r"(?P<name>[\w.@+-]+)=(?P<method>[\w.:-]+)(?:,(?P<settings>.*))?")
_COMMA = re.compile(r",(?=[\w.-]+=)")  # between settings, and not within a value


@dataclass(frozen=True)
class Arm:
    """What stands in one line of a comparison.

    Attributes:
        name: in the table and in folders.
        method: the method's name, or `package.module:name`.
        settings: its own settings, of keys that all methods share or that are the method's; before all others.
    """

    name: str
    method: str
    settings: Mapping[str, Value] = field(default_factory=dict)


def arms_of(texts: Sequence[str]) -> list[Arm]:
    """Arms from words, in order: `METHOD`, or `NAME=METHOD,KEY=VALUE,...`.

    Raises:
        ConfigError: a method is unknown, two arms have one name, or an arm sets what is the same for all.
    """
    arms = list({text: _arm(text) for text in texts}.values())
    names = [arm.name for arm in arms]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"several arms of the comparison are called {', '.join(twice)}: give one another name, NAME=METHOD"
        )
    return arms


def _arm(text: str) -> Arm:
    found = _NAMED.fullmatch(text)
    if not found:
        return Arm(registry.method(text).name, text)
    method, settings = found["method"], _COMMA.split(found["settings"] or "")
    chosen = configuration.parse_settings(setting for setting in settings if setting)
    if given := sorted(GIVEN & chosen.keys()):
        raise ConfigError(f"{found['name']}: {', '.join(given)} must be the same for all arms of a comparison")
    prefix = registry.method(method).name
    if others := sorted(key for key in chosen if "." in key and key.rpartition(".")[0] != prefix):
        raise ConfigError(f"{found['name']}: {', '.join(others)} is no key of {prefix}")
    return Arm(found["name"], method, chosen)

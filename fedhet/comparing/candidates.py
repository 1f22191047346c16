"""Find the methods that can train a federation's clients, and the reasons why other methods cannot."""

import dataclasses
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from fedhet.client.policy import Policy
from fedhet.comparing.settings import distinct, shared_settings, variants_of
from fedhet.comparing.tuning import Choice
from fedhet.config import client_setup
from fedhet.config.user_functions import UserFunctions
from fedhet.engines.running import shake_hands
from fedhet.errors import ConfigError
from fedhet.methods import registry
from fedhet.methods.keys import kebab
from fedhet.methods.method import Traits
from fedhet.methods.options import Config
from fedhet.server.handshake import NOBODY

UNASKED = "there was no time within the budget to ask the clients whether they can train it"

CONTROL = "local"
"""The method that all others are compared with."""

FIRST = ("fedavg", "fedproto", "fedhenn", "fml")
"""Methods that are asked and tried first, if there is no time for all."""


def methods_to_ask(methods: Sequence[str]) -> list[str]:
    """Return the names of all methods in which clients exchange nothing, and of `methods` (by default, all others)."""
    names = registry.methods()
    for name in methods:
        registry.method(name)
    return distinct([CONTROL, *(methods or FIRST), *filter(_alone, names), *(methods or names)])


def _alone(name: str) -> bool:
    """Return whether clients exchange nothing in a method with its default settings."""
    try:
        method = registry.method(name)
        return not method.traits_of(method.Options()).communicates
    except ConfigError:  # a package that is installed and broken; it is asked, and says so
        return False


@dataclass
class Candidates:
    """The methods that can train all clients of a federation, and those that cannot.

    `choices` maps each method that can train them to the settings that had to be changed, and `refused` maps each other
    method to the reason. In the methods named in `alone`, clients exchange nothing.
    """

    choices: dict[str, Choice] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)


def ask(
    methods: Iterable[str],
    base: Mapping[str, Any],
    functions: UserFunctions,
    *,
    seed: int,
    allow: str | None,
    deadline: float = math.inf,
) -> Candidates:
    """Find the methods that can train the clients, by a handshake of each method with untrained clients.

    If a method cannot train them with the settings `base`, as few as possible of its keys declared with
    `option(at_need=...)` are changed. `allow` has the kinds of arrays that may leave the clients, as in a node's
    config. After the `deadline` (`time.monotonic()`), methods are refused without a handshake once one has been found.
    Raises a ConfigError for invalid settings.
    """
    node_config = {} if allow is None else {"allow": allow}
    Policy.of(node_config, deployed=False)
    candidates = Candidates()
    shared_settings(variants_of([CONTROL]), seeds=[seed], config=base, functions=functions, strict=False)
    with _silently():
        for reference in methods:
            if candidates.choices and time.monotonic() > deadline:
                candidates.refused[reference] = UNASKED
                continue
            try:
                name = registry.method(reference).name
                serving = _serving(_configurations(name, base, functions, seed), functions, node_config)
            except Exception as error:  # a method that raises cannot serve
                candidates.refused[reference] = _line(error)
                continue
            if isinstance(serving, str):
                candidates.refused[name] = serving
            else:
                candidates.choices[name], config = serving
                candidates.alone |= set() if registry.traits(config).communicates else {name}
    return candidates


def _serving(
    tries: Iterable[tuple[Choice, Config]], functions: UserFunctions, node_config: Mapping[str, str]
) -> tuple[Choice, Config] | str:
    """Return the first settings in `tries` that can train all clients, or the reason why the first of all cannot."""
    reasons: dict[tuple[Traits, bool], str] = {}
    for choice, config in tries:
        asked = registry.traits(config), config.options.changes_heads
        if asked not in reasons and not reasons.setdefault(asked, _refusal(config, functions, node_config)):
            return choice, config
    return next(iter(reasons.values()))


def _configurations(
    name: str, base: Mapping[str, Any], functions: UserFunctions, seed: int
) -> Iterator[tuple[Choice, Config]]:
    """Yield a method's settings as configured, then with one, two and more `at_need` keys changed (see `option`)."""
    shared = shared_settings(variants_of([CONTROL, name]), seeds=[seed], config=base, functions=functions, strict=False)
    as_they_are = {key: shared.for_all[key] for key in ("architectures", "assign")}  # and not equal ones
    config = shared.settings(name, seed, as_they_are)
    keys = {f"{config.family}.{kebab(key.name)}": key.metadata["at_need"] for key in dataclasses.fields(config.options)}
    changes = product(*([{}, *({key: value} for value in values)] for key, values in keys.items() if values))
    choices: list[Choice] = [{key: value for change in each for key, value in change.items()} for each in changes]
    for choice in sorted(choices, key=len):
        yield choice, shared.settings(name, seed, {**as_they_are, **choice})


def _refusal(config: Config, functions: UserFunctions, node_config: Mapping[str, str]) -> str:
    """Return the reason why a configured method cannot train all clients, or an empty string if it can."""
    try:
        client_setup.check(config, own_model=functions.model is not None, own_data=functions.data is not None)
        if not registry.traits(config).serves_clients:
            return "it trains a model of the server only, and recommend compares clients' models: use fedhet compare"
        public = functions.public_dataset(config)
        strategy = shake_hands(config, functions, None if public is None else public.unlabelled, node_config)
    except Exception as error:
        return _line(error)
    return "; ".join(strategy.run.round.lines())


def _line(error: Exception) -> str:
    """Return an error's message in one line, without the clients' names if all clients failed for one reason."""
    first, *others = [" ".join(line.split()) for line in str(error).splitlines()] or [type(error).__name__]
    if first == NOBODY:
        first = ""
        others = [each.partition("): ")[2] or each for each in others] if len(others) == 1 else others
    return " ".join(filter(None, [first, "; ".join(others)]))


@contextmanager
def _silently() -> Iterator[None]:
    log = logging.getLogger("flwr")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)

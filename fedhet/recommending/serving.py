"""Which methods can serve a federation's clients, and why the others cannot: the methods and the clients say so."""

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from fedhet import population, registry
from fedhet.client.policy import Policy
from fedhet.comparing.settings import SharedSettings, shake_hands, shared_settings, variants_of
from fedhet.comparing.tuning import Choice
from fedhet.keys import kebab
from fedhet.method import METRICS, STRUCTURE, Traits
from fedhet.options import Config
from fedhet.rows import grouped
from fedhet.server.handshake import NOBODY
from fedhet.supplied import Supplied

CONTROL = "local"
"""The method that every other one is compared with."""


@dataclass(frozen=True)
class Candidates:
    """The methods that were asked.

    Attributes:
        choices: by method that can serve all clients, the settings of its own keys to try, the configured ones first.
        alone: the ones of these whose clients exchange nothing.
        sends: the kinds of what leaves a client, by method.
        refused: why the other methods cannot serve, by method.
    """

    choices: dict[str, list[Choice]] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)
    sends: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def ask(
    methods: Iterable[str], base: Mapping[str, Any], supplied: Supplied, *, seed: int, allow: str | None, labels: bool
) -> Candidates:
    """Find the methods that can serve the clients, by a handshake of each with untrained clients.

    Args:
        methods: names or references.
        base: the settings for all methods.
        supplied: the user's models and data.
        seed: seed of the clients' data and models.
        allow: kinds of what may leave the clients, as in a node's config; None for all.
        labels: whether the labels of a configured public dataset are known.

    Raises:
        ConfigError: `allow` names an unknown kind, or no method can run the settings.
    """
    policy = Policy.of({} if allow is None else {"allow": allow}, deployed=False)
    candidates = Candidates()
    shared_settings(variants_of([CONTROL]), seeds=[seed], config=base, supplied=supplied, strict=False)
    with _silently():
        for name in methods:
            known: dict[tuple[Traits, bool], str] = {}

            def refusal(config: Config, known: dict[tuple[Traits, bool], str] = known) -> str:
                asked = registry.traits(config), config.parameters.changes_heads
                if asked not in known:
                    known[asked] = _refusal(config, supplied, policy, allow, labels)
                return known[asked]

            try:
                both = variants_of([CONTROL, name])
                shared = shared_settings(both, seeds=[seed], config=base, supplied=supplied, strict=False)
                tried = [(*each, refusal(each[1])) for each in _configurations(shared, name, seed, refusal)]
            except Exception as error:  # a method that raises cannot serve
                candidates.refused[name] = _line(error)
                continue
            serving = [(choice, registry.traits(config)) for choice, config, reason in tried if not reason]
            if not serving:
                candidates.refused[name] = tried[0][2]
                continue
            candidates.choices[name] = [choice for choice, _ in serving]
            kinds = frozenset[str]().union(*(traits.kinds for _, traits in serving))
            candidates.sends[name] = ", ".join(sorted(kinds - {METRICS, STRUCTURE})) or "nothing"
            if not serving[0][1].communicates:
                candidates.alone.add(name)
    return candidates


def _configurations(
    shared: SharedSettings, name: str, seed: int, refusal: Callable[[Config], str]
) -> Iterator[tuple[Choice, Config]]:
    """The settings of a method's own keys that say which values to try: as configured, and with one key changed.

    If the clients cannot be served as configured, what serves them with the fewest keys changed takes its place.
    """

    def settings(choice: Choice) -> Config:
        return shared.settings(name, seed, {**as_they_are, **choice})

    as_they_are = {key: shared.for_all[key] for key in ("architectures", "assign")}  # and not equal ones
    config = settings({})
    options = {f"{config.family}.{kebab(each.name)}": each.metadata for each in dataclasses.fields(config.parameters)}
    tries = {key: each["tries"] for key, each in options.items() if each["tries"]}
    configured: Choice = {key: config.flat()[key] for key, each in options.items() if each["tries"] or each["at_need"]}
    values = (dict.fromkeys((configured[key], *options[key]["tries"], *options[key]["at_need"])) for key in configured)
    choices: list[Choice] = [dict(zip(configured, each, strict=True)) for each in product(*values)]
    choices.sort(key=lambda choice: sum(value != configured[key] for key, value in choice.items()))
    now = next((each for each in choices if not refusal(settings(each))), configured)
    now = {key: value for key, value in now.items() if key in tries or value != configured[key]}
    yield now, settings(now)
    for key in tries:
        for value in tries[key]:
            changed = settings({**now, key: value})
            if value != now[key] and changed.flat()[key] == value:
                yield {**now, key: value}, changed


def _refusal(config: Config, supplied: Supplied, policy: Policy, allow: str | None, labels: bool) -> str:
    """Why a configured method cannot serve all clients; empty if it can."""
    try:
        policy.check_method(config.method_name, registry.traits(config))
        population.check(config, own_model=supplied.model is not None, own_data=supplied.data is not None)
        if not registry.traits(config).serves_clients:
            return "its model is at the server alone, and clients are compared here: try it by fedhet compare"
        public = supplied.public_dataset(config)
        if public is not None and not labels:
            public = public.unlabelled
        strategy = shake_hands(config, supplied, public, {} if allow is None else {"allow": allow})
    except Exception as error:
        return _line(error)
    return "; ".join(strategy.run.round.lines())


def _line(error: Exception) -> str:
    """Return an error in one line; of one that all clients have, which the handshake lists, only the reason."""
    first, *others = [" ".join(line.split()) for line in str(error).splitlines()] or [type(error).__name__]
    if first == NOBODY:
        first = ""
        others = [each.partition("): ")[2] or each for each in others] if len(others) == 1 else others
    return " ".join(filter(None, [first, "; ".join(others)]))


def by_reason(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return methods, separated by commas, and their reason; they share one if the reasons differ in their names."""

    def common(name: str) -> str:
        named = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", "the method", reasons[name])
        return named.replace(f"{name}.", "METHOD.")  # keys

    return [
        (", ".join(names), reasons[names[0]] if len(names) == 1 else reason)
        for reason, names in grouped((common(name), name) for name in reasons).items()
    ]


@contextmanager
def _silently() -> Iterator[None]:
    """Without the log of refusals, which are the answer."""
    log = logging.getLogger("flwr")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)

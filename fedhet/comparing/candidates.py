"""Find the methods that can train a federation's clients, and the reasons why others cannot."""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fedhet.client.policy import Policy
from fedhet.comparing.settings import Choice, shared_settings, variants_of
from fedhet.engines.running import shake_hands
from fedhet.methods import registry
from fedhet.methods.options import Config
from fedhet.server.handshake import NOBODY
from fedhet.setup import client_setup
from fedhet.setup.user_functions import UserFunctions

CONTROLS = ("local", "label-spreading", "logistic-regression", "nearest-neighbour")
"""Names of the methods in which clients exchange nothing. `recommend` compares federated methods with them."""
FIRST = ("fedavg", "fedhenn", "fml", "fedproto")  # asked and tried first, if there is no time for all
SEED = 1000  # of handshakes and trials


def ask(
    methods: Iterable[str],
    base: Mapping[str, Any],
    functions: UserFunctions,
    *,
    allow: str | None,
    deadline: float = math.inf,
) -> tuple[dict[str, Choice], dict[str, str]]:
    """Find out which `methods` can train the clients, by a handshake with the clients and without training.

    Returns two dictionaries by method: the settings to change for each suitable method (often none), and the reason why
    each other method is unsuitable. `base` has settings for all methods, `functions` the user's models and data, and
    `allow` the kinds of arrays that may leave the clients, such as `"posteriors,prototypes"` (None allows all). Methods
    without a handshake by the `deadline` (in seconds, as `time.monotonic()`) count as unsuitable if another method is
    suitable. Raises a ConfigError for invalid settings.
    """
    node_config = {} if allow is None else {"allow": allow}
    Policy.of(node_config, deployed=False)
    shared_settings(variants_of(CONTROLS[:1]), seeds=[SEED], config=base, functions=functions, strict=False)
    choices, refused = dict[str, Choice](), dict[str, str]()
    logging.disable(logging.CRITICAL)
    try:
        for reference in methods:
            if choices and time.monotonic() > deadline:
                refused[reference] = "the budget left no time to check whether it can train the clients"
                continue
            try:
                name = registry.method(reference).name
                for choice, config in _configurations(name, base, functions):
                    if not (reason := _refusal(config, functions, node_config)):
                        choices[name] = choice
                        refused.pop(name, None)
                        break
                    refused.setdefault(name, reason)
            except Exception as error:  # a method that raises is unsuitable
                refused[reference] = _line(error)
    finally:
        logging.disable(logging.NOTSET)
    return choices, refused


def _configurations(name: str, base: Mapping[str, Any], functions: UserFunctions) -> Iterator[tuple[Choice, Config]]:
    """Yield pairs (settings changed in `base`, configuration) to try for a method; the first has no changes."""
    variants = variants_of([CONTROLS[0], name])
    shared = shared_settings(variants, seeds=[SEED], config=base, functions=functions, strict=False)
    as_they_are = {key: shared.for_all[key] for key in ("architectures", "assign")}  # and not equal ones
    config = shared.settings(name, SEED, as_they_are)
    yield {}, config
    needs = {key: spec.metadata["at_need"] for key, spec in config.specs().items()}
    if choice := {key: value for key, value in needs.items() if value is not None}:
        yield choice, shared.settings(name, SEED, {**as_they_are, **choice})


def _refusal(config: Config, functions: UserFunctions, node_config: Mapping[str, str]) -> str:
    """Return the reason why the method in `config` cannot train all clients, or an empty string if it can."""
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
    lines = str(error).removeprefix(NOBODY).strip().splitlines()
    return "; ".join(" ".join(line.split()) for line in lines) or type(error).__name__

"""Flower's names for the settings of a strategy, and the corresponding names in fedhet."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from fedhet.errors import ConfigError
from fedhet.methods.method import Method
from fedhet.methods.options import kebab, keys_about
from fedhet.utils.text import log

OURS = {
    "lr": "learning-rate",
    "num-rounds": "rounds",
    "num-server-rounds": "rounds",
    "fraction-fit": "fraction-train",
    "proximal-mu": "fedprox.mu",
}
"""Flower's names for settings, with the names of the same settings in fedhet."""

TRAINING = (*keys_about("optimiser"), "local-epochs", "batch-size", "precision", "augment")
"""Configuration keys that Flower's `train_config` may set, for clients that train with fedhet's loop."""


@dataclass(frozen=True)
class FlowerOptions:
    """Arguments that fedhet's strategies and Flower's `FedAvg` share, and that are not configuration keys.

    Attributes:
        min_train_nodes: minimum number of clients that train in a round, regardless of `fraction_train`.
        min_evaluate_nodes: number of clients that must be connected, since all connected clients are evaluated.
        min_available_nodes: number of clients that must be connected before the first round.
        weighted_by_key: name of the metric that is a client's weight, if clients have their own app (`fedhet.wrap`).
        arrayrecord_key: name of the record of arrays that the user's app receives.
        configrecord_key: name of the record of settings that the user's app receives.
    """

    min_train_nodes: int = 0
    min_evaluate_nodes: int = 0
    min_available_nodes: int = 0
    weighted_by_key: str = "num-examples"
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"

    def __post_init__(self) -> None:
        for field in fields(self):
            if not isinstance(value := getattr(self, field.name), field.type):  # type: ignore[arg-type]
                raise ConfigError(f"{field.name} = {value!r}: must be of type {field.type.__name__}")  # type: ignore[union-attr]

    @property
    def names(self) -> dict[str, str]:
        """The options whose names end in `_key` and whose values differ from Flower's defaults, by name."""
        named = ("weighted_by_key", "arrayrecord_key", "configrecord_key")
        return {name: value for name in named if (value := getattr(self, name)) != getattr(FlowerOptions, name)}


def settings_of(strategy: type, given: Mapping[str, Any]) -> tuple[dict[str, Any], FlowerOptions]:
    """Split a strategy's keyword arguments (`given`) into settings, by fedhet's keys, and options shared with Flower.

    Raises a ConfigError if the class has no attribute `method`, or if a function that aggregates metrics is passed.
    """
    method: Method | None = getattr(strategy, "method", None)
    if method is None:
        raise ConfigError(f"{strategy.__name__} has no method: set its class attribute `method` to a fedhet Method")
    names = {each.name for each in fields(FlowerOptions)}
    options = FlowerOptions(**{name: value for name, value in given.items() if name in names})
    method_keys = {kebab(field.name) for field in fields(method.Options)}
    settings: dict[str, Any] = {"method": method.name}
    for name, value in given.items():
        key = kebab(name)
        if key == "fraction-evaluate":
            if value != 1:
                log.warning("fraction_evaluate = %s has no effect: all clients are evaluated; leave it out", value)
        elif key.endswith("-metrics-aggr-fn"):
            hook = f"aggregate_{key.partition('-')[0]}"
            raise ConfigError(f"{name} is not supported: fedhet averages metrics itself; override {hook} in a subclass")
        elif name not in names:
            key = OURS.get(key, key)
            settings[f"{method.family}.{key}" if key in method_keys else key] = value
    return settings, options


def to_send(argument: str, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of the settings that the user wants to be sent to clients; {} for None.

    Raises a ConfigError if they contain the method or the number of rounds, which clients cannot change. Its message
    names `argument`, the argument by which the user passed the settings: `train_config` or `evaluate_config`.
    """
    for name in settings or {}:
        if (key := OURS.get(kebab(name), kebab(name))) in ("method", "rounds"):
            where = "start(num_rounds=...)" if key == "rounds" else "the strategy's class, such as fedhet.FedAvg"
            raise ConfigError(f"the argument {argument} cannot set {name!r}: use {where}")
    return dict(settings or {})


def for_training(train_config: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the settings in `train_config` that are keys of fedhet about training; `known` has all keys of fedhet.

    Raises a ConfigError for other keys of fedhet and for names that look like a misspelt key.
    """
    ours: dict[str, Any] = {}
    for name, value in train_config.items():
        key = OURS.get(kebab(name), kebab(name))
        if key in TRAINING or (key in known and "." in key):
            ours[key] = value
        elif key in known:
            raise ConfigError(f"train_config cannot set {name!r}, which is not about training: pass it to the strategy")
        elif name in ("server-round", "clipping_norm"):  # from Flower's strategies and wrappers
            continue
        elif close := get_close_matches(key, known, n=1, cutoff=0.75):
            raise ConfigError(f"unknown key {key!r} in train_config: did you mean {close[0]!r}?")
    return ours

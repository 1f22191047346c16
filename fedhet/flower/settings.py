"""Translate Flower's names for settings to fedhet's keys."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from fedhet.errors import ConfigError
from fedhet.methods.keys import kebab
from fedhet.methods.method import Method
from fedhet.utils.text import log

OURS = {
    "lr": "learning-rate",
    "num-rounds": "rounds",
    "num-server-rounds": "rounds",
    "fraction-fit": "fraction-train",
    "min-train-nodes": "min-clients",
    "min-evaluate-nodes": "min-clients",
    "min-available-nodes": "min-clients",
    "proximal-mu": "fedprox.mu",
}
"""fedhet's keys by Flower's names; if several names of one key are set, the greatest value counts."""

INSTEAD = {
    "weighted-by-key": "clients are weighted by their numbers of training examples ('num-examples')",
    "arrayrecord-key": "fedhet names the records of its messages itself",
    "configrecord-key": "fedhet names the records of its messages itself",
    "train-metrics-aggr-fn": "observers receive every client's metrics: pass observers=[...]",
    "evaluate-metrics-aggr-fn": "observers receive every client's metrics: pass observers=[...]",
}
"""Flower's settings without a counterpart, and what to use instead."""


def translated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Translate Flower's names of settings to fedhet's keys; raises a ConfigError if a name has no counterpart."""
    keys: dict[str, Any] = {}
    for name, value in settings.items():
        key = kebab(name)
        if key == "fraction-evaluate":
            if value != 1:
                log.warning("fraction_evaluate = %s: all clients are evaluated, every evaluate-every rounds", value)
        elif key == "weighted-by-key" and value == "num-examples":
            continue
        elif key in INSTEAD:
            raise ConfigError(f"{name} is not a key of fedhet: {INSTEAD[key]}; leave it out")
        elif (ours := OURS.get(key)) is not None:
            keys[ours] = max(keys[ours], value) if ours in keys else value
        else:
            keys[key] = value
    return keys


def settings_of(strategy: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the keyword arguments of a strategy class to fedhet's settings.

    Raises a ConfigError if the class does not name its method.
    """
    method: Method | None = getattr(strategy, "method", None)
    if method is None:
        raise ConfigError(f"{strategy.__name__} has no method: set its class attribute `method` to a fedhet Method")
    method_keys = {kebab(field.name) for field in fields(method.Options)}
    return {"method": method.name} | {
        f"{method.family}.{key}" if key in method_keys else key: value for key, value in translated(settings).items()
    }


def split(settings: Mapping[str, Any], known: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a run config of Flower into fedhet's keys, which are `known`, and other keys, which may be for Flower mods.

    Raises a ConfigError for a key that resembles one of fedhet's, or that has no counterpart.
    """
    rest = dict(settings)
    rest.pop("server-round", None)  # Flower's own loop sets it
    further = {key: rest.pop(key) for key in ("clipping_norm",) if key in rest}  # from Flower's wrappers, for its mods
    ours: dict[str, Any] = {}
    for key, value in translated(rest).items():
        if key in known:
            ours[key] = value
        elif close := get_close_matches(key, known, n=1, cutoff=0.75):
            raise ConfigError(f"unknown key {key!r}: did you mean {close[0]!r}?")
        else:
            further[key] = value
    return ours, further

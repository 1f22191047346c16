"""What Flower's users hold: their names for settings, and the strategies of Flower's that go around another one."""

import inspect
import logging
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedhet.errors import ConfigError
from fedhet.method import Traits
from fedhet.options import Config, kebab
from fedhet.wire import Payload, Spec

log = logging.getLogger("flwr").getChild("fedhet")

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
"""Flower's names, and fedhet's for the same; of several for one the greatest counts."""

OF_FLOWERS_LOOP = ("server-round",)
"""What Flower itself puts into a configuration."""

INSTEAD = {
    "weighted-by-key": "clients are weighed by their numbers of training examples ('num-examples')",
    "arrayrecord-key": "fedhet names the records of its messages itself",
    "configrecord-key": "fedhet names the records of its messages itself",
    "train-metrics-aggr-fn": "observers are told every client's metrics: give observers=[...]",
    "evaluate-metrics-aggr-fn": "observers are told every client's metrics: give observers=[...]",
}
"""Settings of Flower's that have no counterpart, and what there is."""

OF_MODS = ("clipping_norm",)
"""Keys that Flower's wrappers send to its mods."""


def translated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under fedhet's kebab-case names, Flower's names among them understood.

    Raises:
        ConfigError: a setting of Flower's that has no counterpart; with what there is instead.
    """
    found: dict[str, Any] = {}
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
            found[ours] = max(found[ours], value) if ours in found else value
        else:
            found[key] = value
    return found


def split(settings: Mapping[str, Any], config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration of Flower's as fedhet's keys, and what is none of them but may be a mod's.

    Raises:
        ConfigError: a key that is nearly one of fedhet's, or has no counterpart.
    """
    given = {key: value for key, value in settings.items() if key not in OF_FLOWERS_LOOP}
    further = {key: given.pop(key) for key in OF_MODS if key in given}
    known = config.flat()
    ours: dict[str, Any] = {}
    for key, value in translated(given).items():
        if key in known:
            ours[key] = value
        elif close := get_close_matches(key, known, n=1, cutoff=0.75):
            raise ConfigError(f"unknown key {key!r}: did you mean {close[0]!r}?")
        else:
            further[key] = value
    return ours, further


def wrapper_of(strategy: Strategy) -> Strategy | None:
    """The strategy of Flower's that holds this one and is calling its hook, such as one for differential privacy.

    Nothing else than who calls tells its loop from Flower's plain one.
    """
    frame = inspect.currentframe()
    while frame is not None and (caller := frame.f_locals.get("self", strategy)) is strategy:
        frame = frame.f_back
    return caller if frame is not None and getattr(caller, "strategy", None) is strategy else None


def check_wrapped(
    wrapper: Strategy, method: str, traits: Traits, specs: Iterable[Spec], arrays: ArrayRecord, config: Config
) -> None:
    """Find out before anything is trained whether a wrapper can do its work on what a method's clients send.

    It compares what a client sends with the arrays that it was given itself, one by one: so there must be one shared
    model, averaged, of floating arrays, and nothing beside it.

    Raises:
        ConfigError: it cannot, why, and what would do.
    """
    name, kinds = type(wrapper).__name__, list(specs)
    if not traits.shares.averaged or traits.networks == "widths" or traits.pool != "none" or not all(kinds):
        raise ConfigError(
            f"{name} works on one model that all clients share and the server averages, and {method} has none: "
            "use fedavg, fedprox, fedrep or lg-fedavg under it"
        )
    if any(list(spec) != list(kinds[0]) for spec in kinds):
        raise ConfigError(f"{name} needs the same arrays of all clients, and under {method} theirs differ")
    if config.wire_dtype != "float32":
        raise ConfigError(f"{name} needs wire-dtype = float32, not {config.wire_dtype}")
    if whole := [key for key, (_, dtype) in kinds[0].items() if not dtype.startswith("float")]:
        raise ConfigError(f"{name} cannot clip {whole[0]}, which holds whole numbers: set batch-norm = local")
    if list(arrays) != list(kinds[0]):
        further = ", ".join([key for key in arrays if key not in kinds[0]][:2])
        raise ConfigError(
            f"{name} compares with initial_arrays one by one, so they must be what {method}'s clients share, in its "
            f"order: {', '.join(list(kinds[0])[:2])}, ... ({len(kinds[0])} arrays)"
            + (f"; leave out {further}" if further else "")
        )


def check_payloads(wrapper: Strategy, method: str, payloads: Mapping[str, Payload]) -> None:
    """Find out whether what is sent is the shared model alone; raises as `check_wrapped`."""
    for payload in payloads.values():
        if set(payload.arrays) != {"model"} or payload.values:
            raise ConfigError(
                f"{type(wrapper).__name__} works on the shared model alone, and {method} sends its clients more"
            )


def simulated(grid: Grid | None) -> bool:
    """Whether Flower simulates the clients of a grid on this machine."""
    return type(grid).__name__ == "InMemoryGrid"

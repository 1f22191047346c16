"""Keys that exclude each other, and keys that have no effect because of others.

Those without effect are refused where a user chose them, and else put back to their defaults.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from fedhet.errors import ConfigError, FedhetError, nearest
from fedhet.keys import default_of
from fedhet.machine import check_device_name
from fedhet.method import Traits
from fedhet.options import OWN, Config, keys_about, listed

LOGS = ("tensorboard", "wandb", "mlflow")
"""Values of the key `log`; `fedhet.results.loggers` has an observer for each."""

OF_ANY_DATA = ("dataset", "clients", "test-split", "test-share", "validation")
"""Keys about data that have an effect on a user's own data, too."""


def conflicts(common: Mapping[str, Any], *, numbers: bool) -> list[str]:
    """Problems of names and, unless some of the `numbers` are wrong already, of keys that do not go together."""
    from fedhet import data, models

    config = Config(**common)
    named: list[tuple[str, str, Collection[str]]] = [
        *(("log", each, LOGS) for each in listed(config.log)),
        ("dataset", config.dataset, [*data.names(), OWN]),
        ("partition", config.partition, data.partitions()),
    ]
    if config.public_dataset:
        named.append(("public-dataset", config.public_dataset, data.names()))
    problems = [nearest(key, name, known) for key, name, known in named if name not in known]
    problems += _problem(lambda: check_device_name(config.device))
    if not re.fullmatch(r"auto|gpu|off|[2-9]|[1-9]\d+", config.client_batching):
        problems.append(
            f"client-batching = {config.client_batching!r}: must be auto, gpu, off, or a number of clients from 2"
        )
    if not numbers:
        return problems + _problem(lambda: models.expand(config.architectures))
    problems += _problem(lambda: models.deal(config.architectures, config.assign, config.clients, config.seed))
    if config.early_stopping and not config.validation:
        problems.append(f"early-stopping = {config.early_stopping}: needs a validation part, such as validation = 0.2")
    if config.min_clients > config.clients and "clients" in common:
        problems.append(f"min-clients = {config.min_clients}: must be at most clients = {config.clients}")
    if config.unseen_clients >= config.clients and "clients" in common:
        problems.append(f"unseen-clients = {config.unseen_clients}: must be fewer than clients = {config.clients}")
    return problems


def _problem(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except FedhetError as error:
        return [str(error)]
    return []


def without_idle(config: Config, by_hand: frozenset[str], reported: Collection[str], traits: Traits) -> Config:
    """Reset keys without effect to their defaults; those that were set are reported.

    Raises:
        ConfigError: such a key was chosen by hand, and so was the one that is the reason; or nobody chose that one.
    """
    specs, flat, idle = config.specs(), config.flat(), without_effect(config, traits)
    defaults = {key: default_of(spec) for key, spec in specs.items()}
    written = {key for key, value in defaults.items() if value != ""} - {"clients", "resume"}
    complete = written <= by_hand  # as in a run's own configuration

    def in_vain(key: str, reason: str) -> bool:
        # A default says something unless it is "none", or that of a complete configuration, where nobody chose it.
        says = bool(defaults[key]) and not complete
        differs = flat[key] != defaults[key]
        return key in by_hand and ((says or differs) if reason in by_hand else says and reason not in reported)

    refused = {key for key, reason in idle.items() if in_vain(key, reason)}
    idle = {key: reason for key, reason in idle.items() if flat[key] != defaults[key] or key in refused}
    because = {key: f"{key} has no effect with {reason} = {flat[reason]}" for key, reason in idle.items()}
    if refused:
        raise ConfigError("\n".join(f"{why}: leave it out" for key, why in because.items() if key in refused))
    back = {specs[key].name: defaults[key] for key in idle if "." not in key}
    mine = {specs[key].name: defaults[key] for key in idle if "." in key}
    known = tuple((key, why) for key, why in because.items() if key in reported)  # else it is the method's own default
    return config.but(**back, parameters=dataclasses.replace(config.parameters, **mine), idle=known)


def without_effect(config: Config, traits: Traits) -> dict[str, str]:
    """Return keys without effect, each with the key that is the reason; for other keys they have their defaults."""
    from fedhet import data  # which needs torch

    flat, idle = config.flat(), dict[str, str]()
    for key, spec in config.specs().items():
        prefix = key.removesuffix(key.rpartition(".")[2])
        for other, values in spec.metadata["needs"].items():
            value = flat[prefix + other]
            if (value not in values) if values else not value:
                idle[key], flat[key] = prefix + other, default_of(spec)
    idle |= config.parameters.idle(config)
    if not traits.bounded:
        idle["clip-norm"] = "method"
    if config.aggregation not in traits.aggregations:
        idle["aggregation"] = "method"
    if not data.augments(config.dataset):
        idle["augment"] = "dataset"
    if config.dataset == OWN:
        idle |= dict.fromkeys((key for key in keys_about("data") if key not in OF_ANY_DATA), "dataset")
    return idle

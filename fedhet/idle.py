"""Keys that have no effect beside others: refused where a user chose them, and else put back to their defaults."""

import dataclasses
from collections.abc import Collection
from dataclasses import fields

from fedhet.errors import ConfigError
from fedhet.keys import default_of, kebab
from fedhet.method import Traits
from fedhet.options import Config, common_fields

UNWRITTEN = ("clients", "resume")
"""Keys that a run's own configuration may be without."""


def without_idle(config: Config, by_hand: frozenset[str], told: Collection[str], traits: Traits) -> Config:
    """The configuration with its keys that have no effect put back; those that somebody set are told.

    Raises:
        ConfigError: such a key was chosen by hand, and so was the one that is the reason; or nobody chose that one.
    """
    from fedhet import data  # which needs torch

    idle = _beside_others(config) | config.parameters.idle(config)
    if not traits.bounded:
        idle["clip-norm"] = "method"
    if config.aggregation not in traits.aggregations:
        idle["aggregation"] = "method"
    if not data.augments(config.dataset):
        idle["augment"] = "dataset"
    flat, own = config.flat(), f"{config.family}."
    defaults = {kebab(f.name): default_of(f) for f in common_fields()}
    defaults |= {own + kebab(f.name): default_of(f) for f in fields(config.parameters)}
    complete = {key for key, value in defaults.items() if value != "" and key not in UNWRITTEN} <= by_hand

    def in_vain(key: str, reason: str) -> bool:
        # A default says something unless it is "none", or that of a complete configuration, where nobody chose it.
        says = bool(defaults[key]) and not complete
        differs = flat[key] != defaults[key]
        return key in by_hand and ((says or differs) if reason in by_hand else says and reason not in told)

    refused = {key for key, reason in idle.items() if in_vain(key, reason)}
    idle = {key: reason for key, reason in idle.items() if flat[key] != defaults[key] or key in refused}
    because = {key: f"{key} has no effect with {reason} = {flat[reason]}" for key, reason in idle.items()}
    if refused:
        raise ConfigError("\n".join(f"{why}: leave it out" for key, why in because.items() if key in refused))
    back = {f.name: default_of(f) for f in common_fields() if kebab(f.name) in idle}
    mine = {f.name: default_of(f) for f in fields(config.parameters) if own + kebab(f.name) in idle}
    known = tuple((key, why) for key, why in because.items() if key in told)  # else it is the method's own default
    return config.but(**back, parameters=dataclasses.replace(config.parameters, **mine), idle=known)


def _beside_others(config: Config) -> dict[str, str]:
    """Keys that lack another one which they need, each with that one; what is idle counts as its default."""
    flat, idle = config.flat(), {}
    for prefix, known in (("", common_fields()), (f"{config.family}.", fields(config.parameters))):
        for field in known:
            key = prefix + kebab(field.name)
            for other, values in field.metadata["needs"].items():
                value = flat[prefix + other]
                if (value not in values) if values else not value:
                    idle[key], flat[key] = prefix + other, default_of(field)
    return idle

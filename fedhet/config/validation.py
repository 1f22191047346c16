"""Check that the values of configuration keys are consistent, and find keys without effect.

A key without effect is refused if the user set it, and otherwise reset to its default.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any, NamedTuple

from fedhet.errors import ConfigError, FedhetError, nearest
from fedhet.methods.method import Traits
from fedhet.methods.options import OWN, Config, OwnPart, default_of, listed, unmet
from fedhet.utils.machine import check_device_name

SUPPLIED: dict[OwnPart, str] = {
    "data": "data of your own",
    "split": "a data function of your own, which splits the data",
    "model": "models of your own",
    "loader": "a DataLoader, which has its own batch_size",
    "augmentation": "an augment function of your own, which the data function returns",
}
"""Descriptions, for messages, of what a user can pass in Python in place of configuration keys."""


def conflicts(common: Mapping[str, Any]) -> list[str]:
    """Return a message for each invalid or contradictory value in `common`, fields of `Config` with their values."""
    from fedhet import data, models

    config = Config(**common)
    named: list[tuple[str, str, Collection[str]]] = [
        *(("log", each, ("tensorboard", "wandb", "mlflow")) for each in listed(config.log)),
        ("dataset", config.dataset, [*data.names(), OWN]),
        ("partition", config.partition, data.partitions()),
    ]
    problems = [nearest(key, name, names) for key, name, names in named if name not in names]
    checks: tuple[Callable[[], object], ...] = (
        lambda: check_device_name(config.device),
        lambda: models.expand(config.architectures),
        lambda: config.resources,
    )
    for check in checks:
        try:
            check()
        except FedhetError as error:
            problems.append(str(error))
    if config.min_clients > config.clients and "clients" in common:
        problems.append(f"min-clients = {config.min_clients}: must be at most clients = {config.clients}")
    if config.unseen_clients >= config.clients and "clients" in common:
        problems.append(f"unseen-clients = {config.unseen_clients}: must be fewer than clients = {config.clients}")
    return problems


class Reason(NamedTuple):
    """The reason why a configuration key has no effect.

    Attributes:
        of: the cause: another key, or what the user passes in Python, such as `data`.
        words: a description of the cause, such as `method = fedavg`.
        remedy: an instruction after which the key has an effect, such as `set partition = dirichlet`, or empty.
    """

    of: str
    words: str
    remedy: str = ""

    def sentence(self, key: str) -> str:
        """Return a message that says why `key` has no effect and what to do."""
        otherwise = f"{self.remedy}, or leave {key} out" if self.remedy else "leave it out"
        return f"{key} has no effect with {self.words}: {otherwise}"


def ineffective(config: Config, traits: Traits, own: Set[OwnPart] = frozenset()) -> dict[str, Reason]:
    """Return the reason for each configuration key that has no effect, by key.

    `traits` are the properties of the method, and `own` has what the user passes in Python in place of keys.
    """
    from fedhet import data  # which imports torch

    if config.dataset == OWN:
        own = own | {"data", "model"}
    flat = config.flat()
    reasons = dict[str, Reason]()
    for key, spec in config.specs().items():
        replaced = spec.metadata["replaced_by"]
        trait = spec.metadata["trait"]
        gives = key in config.options.uses or not trait or getattr(traits, trait)
        if key == "augment" and "augmentation" in own:
            reasons[key] = Reason("augmentation", SUPPLIED["augmentation"])
        elif replaced and own >= {*replaced} and key not in config.options.uses:
            reasons[key] = Reason(replaced[0], " and ".join(SUPPLIED[part] for part in replaced))
        elif key in config.options.without or not (flat[key] in gives if isinstance(gives, tuple) else gives):
            reasons[key] = Reason("method", f"method = {config.method_name}")
        elif key in data.keys_without_effect(config.dataset):
            reasons[key] = Reason("dataset", f"dataset = {config.dataset}")
        else:
            prefix = key.removesuffix(key.rpartition(".")[2])
            for name, wanted in spec.metadata["needs"].items():
                other = prefix + name
                if remedy := unmet(other, flat[other], wanted):
                    value = str(flat[other]).lower() if isinstance(flat[other], bool) else str(flat[other]) or '""'
                    reasons[key] = reasons.get(other) or Reason(other, f"{other} = {value}", remedy)
        if key in reasons:
            flat[key] = default_of(spec)
    return reasons


def effective(config: Config, traits: Traits, own: Set[OwnPart] = frozenset(), *, strict: bool = True) -> Config:
    """Return `config` with the default for each key without effect; `dataset` is `own` for a user's models and data.

    `traits` are the method's properties; `own` has what the user passes in Python, such as `model`. If a key that the
    user set has no effect, raises a ConfigError, except for a key of a file that a key on the command line makes
    ineffective. If not `strict`, adds the reason to the result's `remarks` instead, also for keys of a preset.
    """
    specs = config.specs()
    flat = config.flat()
    reasons = ineffective(config, traits, own)
    reset = {key: OWN if key == "dataset" else default_of(specs[key]) for key in reasons}
    origins = {key: origin for key, origin in config.origins.items() if origin != "preset" or not strict}
    vain = dict[str, Reason]()
    for key, reason in reasons.items():
        # The user may set a default of 0 or "", and a run writes all defaults.
        stated = flat[key] not in (0, "", OWN) and origins.get(key) != "run"
        if key in origins and (stated or flat[key] != reset[key] or reason.of == "augmentation"):
            vain[key] = reason
    for key in sorted(origins.keys() - specs.keys()):
        if "." in key and origins[key] != "run":
            method, _, name = key.rpartition(".")
            remedy = f"set method = {method}" if method != config.method_name else f"set {config.family}.{name}"
            vain[key] = Reason("method", f"method = {config.method_name}", remedy)
    sentences = {key: reason.sentence(key) for key, reason in vain.items()}
    by_command = {key for key, origin in origins.items() if origin == "command"}
    refused = [sentences[key] for key in vain if key in by_command or vain[key].of not in by_command]
    if strict and refused:
        raise ConfigError("\n".join(refused))
    common = {specs[key].name: value for key, value in reset.items() if "." not in key}
    of_method = {specs[key].name: value for key, value in reset.items() if "." in key}
    changed = config.replace(**common, options=dataclasses.replace(config.options, **of_method))
    if not strict:
        return changed.replace(remarks=tuple((dict(config.remarks) | sentences).items()))
    left = {key: origin for key, origin in config.origins.items() if key not in vain or origin == "run"}
    return changed.replace(origins=left)

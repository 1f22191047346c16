"""Keys that exclude each other, and keys that have no effect, as `option` declares what each belongs to.

A key without effect is refused if a user set it, and else reset to its default.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any, NamedTuple

from fedhet.errors import ConfigError, FedhetError, nearest
from fedhet.methods.keys import OwnPart, Value, default_of, unmet
from fedhet.methods.method import Traits
from fedhet.methods.options import OWN, Config, fields_of, listed
from fedhet.utils.machine import check_device_name

LOGS = ("tensorboard", "wandb", "mlflow")
"""Values of the key `log`; `fedhet.results.loggers` has an observer for each."""

SUPPLIED: dict[OwnPart, str] = {
    "data": "data of your own",
    "model": "models of your own",
    "loader": "a DataLoader, whose own batch_size counts",
}
"""Parts that a user supplies, in words."""


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
    if not numbers:
        return problems + _problem(lambda: models.expand(config.architectures))
    problems += _problem(lambda: models.deal(config.architectures, config.assign, config.clients, config.seed))
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


class Reason(NamedTuple):
    """Why a key has no effect.

    Attributes:
        of: the key that it belongs to (`method` for the method), or what the user supplies in its place.
        words: this key with its value, or what the user supplies in words.
        remedy: what gives the key an effect; empty if nothing does.
    """

    of: str
    words: str
    remedy: str = ""

    def sentence(self, key: str) -> str:
        """Return what has no effect, because of what, and what to do."""
        otherwise = f"{self.remedy}, or leave {key} out" if self.remedy else "leave it out"
        return f"{key} has no effect with {self.words}: {otherwise}"


def ineffective(config: Config, traits: Traits, own: Set[OwnPart] = frozenset()) -> dict[str, Reason]:
    """Return the keys that have no effect beside the others and what the user supplies (`own`), with the reasons."""
    from fedhet import data  # which needs torch

    own = own | {"data", "model"} if config.dataset == OWN else own
    flat, found = config.flat(), dict[str, Reason]()
    for key, spec in config.specs().items():
        replaced, trait = spec.metadata["replaced_by"], spec.metadata["trait"]
        gives = getattr(traits, trait) if trait else True
        if replaced and own >= {*replaced} and key not in config.parameters.uses:
            found[key] = Reason(replaced[0], " and ".join(SUPPLIED[each] for each in replaced))
        elif key in config.parameters.without or not (flat[key] in gives if isinstance(gives, tuple) else gives):
            found[key] = Reason("method", f"method = {config.method_name}")
        elif key == "augment" and not data.augments(config.dataset):
            found[key] = Reason("dataset", f"dataset = {config.dataset}")
        else:
            prefix = key.removesuffix(key.rpartition(".")[2])
            needs = {prefix + other: wanted for other, wanted in spec.metadata["needs"].items()}
            for other, wanted in needs.items():
                if remedy := unmet(other, flat[other], wanted):
                    found[key] = found.get(other) or Reason(other, f"{other} = {_said(flat[other])}", remedy)
        if key in found:
            flat[key] = default_of(spec)
    return found


def is_complete(chosen: Collection[str]) -> bool:
    """Return whether the chosen keys are all that methods share, as in the file of a run."""
    written = {key for key, spec in fields_of(Config).items() if default_of(spec) != ""}
    return written - {"clients", "resume"} <= {*chosen}


def _said(value: Value) -> str:
    """Return a value as a sentence has it."""
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def effective(
    config: Config,
    traits: Traits,
    chosen: Collection[str],
    own: Set[OwnPart] = frozenset(),
    *,
    strict: bool = True,
    over: Collection[str] = (),
) -> Config:
    """Reset keys without effect to their defaults, and `dataset` to `own` beside data and models of the user's own.

    Args:
        config: the configuration.
        traits: its method's.
        chosen: keys that were set; those of other methods have no effect.
        own: what the user supplies.
        strict: whether chosen keys without effect are refused; else they are in the remarks.
        over: keys that were set over others in `chosen`, which may lose their effect by it.

    Raises:
        ConfigError: chosen keys have no effect, and their values ask for one.
    """
    specs, flat, found = config.specs(), config.flat(), ineffective(config, traits, own)
    reset = {key: OWN if key == "dataset" else default_of(specs[key]) for key in found}
    written = is_complete(chosen)

    def asks(key: str) -> bool:
        # A default asks for something unless it is "none", or was written by a run.
        return flat[key] != reset[key] or (flat[key] not in (0, "", OWN) and not written)

    vain = {key: reason for key, reason in found.items() if key in chosen and asks(key)}
    for key in sorted(key for key in {*chosen} - specs.keys() if "." in key and not written):
        vain[key] = Reason("method", f"method = {config.method_name}", f"set method = {key.rpartition('.')[0]}")
    because = {key: reason.sentence(key) for key, reason in vain.items()}
    refused = [why for key, why in because.items() if key in over or vain[key].of not in over]
    if strict and refused:
        raise ConfigError("\n".join(refused))
    common = {specs[key].name: value for key, value in reset.items() if "." not in key}
    of_method = {specs[key].name: value for key, value in reset.items() if "." in key}
    return config.replace(
        **common,
        parameters=dataclasses.replace(config.parameters, **of_method),
        chosen=config.chosen if written or not strict else config.chosen.difference(vain),
        remarks=config.remarks if strict else tuple((dict(config.remarks) | because).items()),
    )

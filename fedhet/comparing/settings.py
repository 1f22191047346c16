"""The settings of a comparison: settings that all variants share, and settings of single variants."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedhet.config import configuration, toml
from fedhet.config.toml import parse_settings, toml_value
from fedhet.errors import ConfigError, check_list
from fedhet.methods import registry
from fedhet.methods.method import UNSCORED, Method
from fedhet.methods.options import OWN, Config, Value, default_of, fields_of, keys_about, keys_that
from fedhet.setup import client_setup
from fedhet.setup.user_functions import UserFunctions
from fedhet.utils.statistics import grouped

Choice = dict[str, Value]
"""Settings to try together: values of one or several configuration keys, by key."""
PLACES = frozenset(keys_about("place"))
"""Keys that say where and how a run is carried out, such as `out` and `workers`, and do not change the results."""
SET_HERE = PLACES - {"report"} | {"seed"}  # keys that a comparison sets itself for each run
FILES = frozenset(keys_that("path")).intersection(keys_that("resumable")) - PLACES
"""Keys for the paths of data sets, which may have other values when a comparison is resumed."""
SAME_FOR_ALL = PLACES | {"method", "seed", "preset", *keys_about("data", "output")}
"""Keys that have the same value in all variants, so that a variant cannot set them."""
OPTIMISER = keys_about("optimiser")  # equal for all methods, except if clients do not train their networks
EQUAL_MODEL = "cnn"
"""The model that all clients get if a method requires equal architectures and the settings have different ones."""

_VARIANT = re.compile(r"(?:(?P<name>[\w.@+-]+)=)?(?P<method>[^,=]+)(?:,(?P<settings>.*))?")
_COMMA = re.compile(r",(?=[\w.-]+=)")  # between settings, and not within a value


@dataclass(frozen=True)
class Variant:
    """A variant: a method (given by name or `package.module:name`) with its own settings, by key, in a comparison."""

    name: str
    method: str
    settings: Mapping[str, Value] = field(default_factory=dict)


def variants_of(methods: Sequence[Any]) -> list[Variant]:
    """Parse texts `[NAME=]METHOD[,KEY=VALUE,...]`; a strategy class with a method stands for the method's name.

    Raises a `ConfigError` for unknown methods and repeated names.
    """
    texts = [registry.name_of(item) for item in methods] if isinstance(methods, list | tuple) else methods
    check_list("methods", texts, str, f"['fedhenn', 'local']; a method of your own is {registry.EXPECTED}")
    variants = [_variant(text) for text in distinct(texts)]
    names = [variant.name for variant in variants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"several methods have the name {', '.join(twice)}: rename all but one with NAME=METHOD")
    return variants


def _variant(text: str) -> Variant:
    match = _VARIANT.fullmatch(text)
    if not match:
        form = "METHOD or YOURNAME=METHOD,KEY=VALUE,... (YOURNAME has letters, digits, '_', '.', '@', '+' and '-')"
        raise ConfigError(f"{text} names no method: write {form}")
    method = match["method"]
    name = match["name"] or registry.method(method).name
    settings = parse_settings(setting for setting in _COMMA.split(match["settings"] or "") if setting)
    if same := sorted(SAME_FOR_ALL & settings.keys()):
        raise ConfigError(f"method {name}: set {', '.join(same)} for all methods at once (--set), not for one")
    prefix = registry.method(method).family
    if others := sorted(key for key in settings if "." in key and key.rpartition(".")[0] != prefix):
        raise ConfigError(f"method {name}: {', '.join(others)} is not a key of {prefix}: see fedhet keys {prefix}")
    return Variant(name, method, settings)


@dataclass(frozen=True)
class ComparedRun:
    """A run of a method; `equalised` is True if all clients get one architecture, as the method requires."""

    variant: str
    seed: int
    folder: Path
    equalised: bool

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.folder.name


@dataclass(frozen=True)
class PlannedRun(ComparedRun):
    """A run with its settings, which may not have begun."""

    settings: Config


@dataclass(frozen=True)
class SharedSettings:
    """The settings of all runs of a comparison; a variant is a method with its own settings.

    Attributes:
        for_all: the settings that all variants share, by key.
        own: each variant's own settings, including `method`, by the variant's name.
        fixed: the keys that the user set for one variant, which are not tuned, by the variant's name.
        equalised: variants whose clients all get one architecture because the method requires this.
        notes: remarks on the settings, printed below the tables.
        functions: the user's models, data and task.
    """

    for_all: Mapping[str, Value]
    own: Mapping[str, Mapping[str, Value]]
    fixed: Mapping[str, frozenset[str]]
    equalised: frozenset[str]
    notes: Sequence[str]
    functions: UserFunctions

    def settings(self, variant: str, seed: int, choice: Mapping[str, Value] | None = None) -> Config:
        """Return a variant's configuration with a seed, changed by `choice`; raises a `ConfigError` if invalid."""
        return config_of(self.for_all, self.own[variant], choice or {}, {"seed": seed})

    def plan(self, variant: str, seed: int, folder: Path, choice: Mapping[str, Value] | None = None) -> PlannedRun:
        """Plan the run of a variant with a seed in `folder`; `choice` changes settings."""
        return PlannedRun(variant, seed, folder, variant in self.equalised, self.settings(variant, seed, choice))


def shared_settings(
    variants: Sequence[Variant],
    *,
    seeds: Sequence[int],
    config: Mapping[str, object],
    functions: UserFunctions = UserFunctions(),  # noqa: B008 - it is frozen
    strict: bool = True,
) -> SharedSettings:
    """Return the settings that all variants (methods with settings) of a comparison share, and those of each variant.

    `seeds` are the seeds of all runs, `config` has the user's settings by key or in nested tables, and `functions` the
    user's models and data. Raises a FedhetError if settings are invalid or, with `strict`, without effect in all runs.
    """
    flat = toml.chosen(config)
    base = {key: value for key, value in flat.items() if key not in SET_HERE | {"method"}}
    base["seed"] = seeds[0]
    base = _method_keys_of_presets([registry.method(variant.method) for variant in variants], base) | base
    first = registry.method(variants[0].method)
    rounds = {"rounds": Config.rounds, **first.common, **_preset(base, first), **base}["rounds"]
    rounds_of = {variant.name: variant.settings.get("rounds", rounds) for variant in variants}
    by_hand = frozenset(flat.keys() - {"preset"})
    origin = configuration.origin_of(by_hand)

    def resolve(variant: Variant, settings: Mapping[str, Value]) -> Config:
        return config_of(base, {"rounds": rounds_of[variant.name]}, settings, {"method": variant.method})

    def complete(resolved: Config, names: frozenset[str]) -> Config:
        remarks = tuple((key, reason) for key, reason in resolved.remarks if key in names)  # and not what presets set
        origins = dict.fromkeys(names, origin)
        return functions.adapted(resolved.replace(origins=origins, remarks=remarks), strict=False)

    completed = {
        variant.name: complete(resolve(variant, variant.settings), by_hand | variant.settings.keys())
        for variant in variants
    }
    problems = [
        f"{name}: rounds = 0 trains nothing: set rounds for all methods, or for this one ({name},rounds=6)"
        for name, config in completed.items()
        if not (config.rounds or config.start_from or registry.method(config.method_name).settles_rounds)
    ]
    if strict and (problems := [*problems, *_without_effect(variants, flat, completed)]):
        raise ConfigError("\n".join(problems))
    alike = {variant.name: resolve(variant, {}) for variant in variants}
    for_all = _for_all(alike, {name: complete(variant, by_hand).flat() for name, variant in alike.items()})
    for key in ("public-samples", "closing-epochs"):
        for_all[key] = max(config.flat()[key] for config in completed.values())

    own: dict[str, dict[str, Value]] = {}
    equalised, notes = set[str](), list[str]()
    for variant in variants:
        name = variant.name
        wanted = _suited_training(completed[variant.name], base, functions)
        own[name], said = _own_settings(variant, completed[variant.name], for_all, wanted, by_hand)
        own[name]["rounds"] = rounds_of[name]
        notes += said
        configs = [config_of(for_all, own[name], {"seed": seed}) for seed in seeds]
        if functions.model is None and any(map(client_setup.must_be_equal, configs)):
            equalised.add(name)
            own[name] |= {"architectures": EQUAL_MODEL, "assign": "round-robin"}
        if configs[0].test_on == "local" and not registry.traits(configs[0]).serves_clients:
            notes.append(UNSCORED.format(name))
    fixed = {variant.name: frozenset(variant.settings) for variant in variants}
    notes += _remarks(completed, by_hand)
    return SharedSettings(for_all, own, fixed, frozenset(equalised), notes, functions)


def _for_all(alike: Mapping[str, Config], adapted: Mapping[str, Mapping[str, Value]]) -> dict[str, Value]:
    """Return the settings for all variants: a key's value is that of the first variant in which the key has an effect.

    `alike` has, by variant, the configuration without the settings given for it only, and `adapted` the values in this
    after adaptation to the user's models and data. The optimiser's values are from `alike`, all others from `adapted`.
    """

    def first(key: str) -> str:
        return next((name for name, config in alike.items() if key not in dict(config.remarks)), next(iter(alike)))

    trains = alike[first("learning-rate")].flat()
    return {key: trains[key] if key in OPTIMISER else adapted[first(key)][key] for key in fields_of(Config)}


def _remarks(completed: Mapping[str, Config], by_hand: Set[str]) -> Iterator[str]:
    """Yield remarks on keys that have no effect or whose values were changed, with the variants that they concern.

    `completed` has the configurations by variant. Remarks on keys in `by_hand`, which the user set, omit the remedy.
    """
    remarks = grouped(
        (remark.partition(": ")[0] if key in by_hand else remark, name)
        for name, config in completed.items()
        for key, remark in config.remarks
        if "." not in key or key in config.specs()
    )
    for remark, names in remarks.items():
        yield remark if len(names) == len(completed) else f"{', '.join(names)}: {remark}"


def _preset(base: Mapping[str, Any], method: Method) -> dict[str, Any]:
    name = str(base.get("preset", ""))
    return configuration.own_settings(method, base) if name == OWN else configuration.preset_settings(name)


def _own_preset(method: Method, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the method's preset for the data set of `base["preset"]`, by key; {} if there is none."""
    name = str(base.get("preset", "")).rpartition("/")[2]
    preset = name if name == OWN else f"{method.family}/{name}"
    return _preset({**base, "preset": preset}, method) if preset in (OWN, *configuration.presets()) else {}


def _method_keys_of_presets(methods: Sequence[Method], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of single methods, such as `fedprox.mu`, in the methods' presets, by key.

    `base` has the comparison's settings by key. Its `preset`, such as `fedavg/digits`, names the presets' data set.
    """
    for_all = _preset(base, methods[0])
    method_keys = dict[str, Any]()
    for method in methods:
        settings = _own_preset(method, base)
        prefix = f"{method.family}."
        method_keys |= {key: settings[key] for key in settings.keys() - for_all.keys() if key.startswith(prefix)}
    return method_keys


def _suited_training(config: Config, base: Mapping[str, Any], functions: UserFunctions) -> dict[str, Value]:
    if not (method := registry.method(config.method_name)).trains:
        return {}
    preset = _own_preset(method, base)
    suited = {} if functions.model is None else config.options.suited()
    values = preset | {key: value for key, (value, _) in suited.items()}
    return {key: values[key] for key in OPTIMISER if key in values}


def _own_settings(
    variant: Variant, config: Config, for_all: Mapping[str, Value], wanted: Mapping[str, Value], by_hand: Set[str]
) -> tuple[dict[str, Value], list[str]]:
    settings = {key: value for key, value in config.flat().items() if key.startswith(f"{config.family}.")}
    settings["disclose-architecture"] = config.disclose_architecture  # a method's promise, whoever comes first
    notes = []
    if not config.shared_init and for_all["shared-init"]:  # it matches or keeps what clients bring
        settings["shared-init"] = False
        notes.append(f"{variant.name}: clients start from initial weights of their own (shared-init = false)")
    chosen = by_hand | variant.settings.keys()
    training = {key: value for key, value in wanted.items() if value != for_all[key] and key not in chosen}
    if training:
        said = ", ".join(f"{key} = {toml_value(setting)}" for key, setting in training.items())
        trains = registry.method(variant.method).trains
        notes.append(f"{variant.name}: its clients train {trains}, with {said} of its own")
    return {**settings, **training, "method": variant.method, **variant.settings}, notes


def config_of(*layers: Mapping[str, Any]) -> Config:
    """Return the configuration with these settings, of which later ones replace earlier ones; see `resolve`."""
    return configuration.resolve({key: value for layer in layers for key, value in layer.items()}, strict=False)


def distinct(values: Iterable[Any]) -> list[Any]:
    """Return the values without repetitions, in order of their first occurrence."""
    return list(dict.fromkeys(values))


def _without_effect(
    variants: Sequence[Variant], chosen: Mapping[str, Any], completed: Mapping[str, Config]
) -> Iterator[str]:
    """Yield an error message for each key without effect, if the user set it for a variant or, in `chosen`, for all.

    `completed` has each variant's configuration, whose remarks say which keys have no effect, by the variant's name.
    """
    remarks = {name: dict(config.remarks) for name, config in completed.items()}
    for variant in variants:
        yield from (
            f"{variant.name}: {remark}" for key, remark in remarks[variant.name].items() if key in variant.settings
        )
    for key, value in {} if configuration.origin_of(chosen) == "run" else chosen.items():
        if key in SET_HERE and value != default_of(fields_of(Config)[key]):
            yield f"{key} has no effect here, since a comparison sets it for each run: leave it out"
        if all(key in of_variant for of_variant in remarks.values()):
            yield next(of_variant[key] for of_variant in remarks.values())

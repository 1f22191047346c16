"""The settings of a comparison: which ones all variants share, and which are a variant's own."""

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedhet import config as configuration
from fedhet import population, registry
from fedhet.client.app import make_client_app
from fedhet.data import PublicDataset
from fedhet.errors import ConfigError
from fedhet.flower.grid import LocalGrid
from fedhet.machine import process_restored
from fedhet.options import Config, Value, keys_about
from fedhet.supplied import Supplied

PLACES = frozenset(keys_about("place"))
"""Where and how a run is carried out, which the comparison decides and which changes nothing of what is computed."""

SAME_FOR_ALL = PLACES | {"method", "seed", "preset", *keys_about("data", "output")}
"""Keys that no variant can set."""

EQUAL_MODEL = "cnn"
"""The model of all clients under a method that needs equal architectures, where the settings mix them."""

_NAMED = re.compile(r"(?P<name>[\w.@+-]+)=(?P<method>[^,=]+)(?:,(?P<settings>.*))?")
_COMMA = re.compile(r",(?=[\w.-]+=)")  # between settings, and not within a value


@dataclass(frozen=True)
class Variant:
    """One line of a comparison: a method, by name or `package.module:name`, perhaps with settings of its own."""

    name: str
    method: str
    settings: Mapping[str, Value] = field(default_factory=dict)


def variants_of(texts: Sequence[str]) -> list[Variant]:
    """Parse variants, in order: `METHOD`, or `NAME=METHOD,KEY=VALUE,...`.

    A `ConfigError` says that a method is unknown, a name is there twice, or a key of `SAME_FOR_ALL` is set.
    """
    variants = [_variant(text) for text in distinct(texts)]
    names = [variant.name for variant in variants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"several variants of the comparison are called {', '.join(twice)}: give one another name, NAME=METHOD"
        )
    return variants


def _variant(text: str) -> Variant:
    match = _NAMED.fullmatch(text)
    if not match:
        return Variant(registry.method(text).name, text)
    name, method = match["name"], match["method"]
    settings = configuration.parse_settings(each for each in _COMMA.split(match["settings"] or "") if each)
    if same := sorted(SAME_FOR_ALL & settings.keys()):
        raise ConfigError(f"{name}: {', '.join(same)} must be the same for all variants of a comparison")
    prefix = registry.method(method).family
    if others := sorted(key for key in settings if "." in key and key.rpartition(".")[0] != prefix):
        raise ConfigError(f"{name}: {', '.join(others)} is no key of {prefix}")
    return Variant(name, method, settings)


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison; `equalised` if its method needs equal architectures and so got one model for all."""

    variant: str
    seed: int
    settings: Config
    folder: Path
    equalised: bool

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.folder.name


@dataclass(frozen=True)
class SharedSettings:
    """The settings that the variants of a comparison share, and those of their `own`, such as the method.

    Attributes:
        fixed: keys that each variant sets itself, which cannot be tuned.
        equalised: variants that need equal architectures where the settings mix them, and so get one model for all.
        notes: what a reader must know of the settings.
        supplied: models and data of the user's own.
    """

    for_all: Mapping[str, Value]
    own: Mapping[str, Mapping[str, Value]]
    fixed: Mapping[str, frozenset[str]]
    equalised: frozenset[str]
    notes: Sequence[str]
    supplied: Supplied

    def settings(self, variant: str, seed: int, choice: Mapping[str, Value] | None = None) -> Config:
        """Return a variant's settings, some of them chosen for it; a `ConfigError` if they cannot be run."""
        settings = {**self.for_all, **self.own[variant], **(choice or {}), "seed": seed}
        return configuration.resolve(settings, strict=False)

    def plan(self, variant: str, seed: int, folder: Path, choice: Mapping[str, Value] | None = None) -> PlannedRun:
        """Return the run with these settings; raises as `settings`."""
        return PlannedRun(variant, seed, self.settings(variant, seed, choice), folder, variant in self.equalised)


def shared_settings(
    variants: Sequence[Variant],
    *,
    seeds: Sequence[int],
    config: Mapping[str, object],
    supplied: Supplied = Supplied(),  # noqa: B008 - it is frozen
) -> SharedSettings:
    """Work out which settings the variants share, as `compare` says; a `FedhetError` has every problem of them."""
    base = {key: value for key, value in config.items() if key not in PLACES | {"method", "seed"}}
    base["seed"] = seeds[0]
    base = _method_keys_of_presets(variants, base) | base
    rounds = _rounds(variants, base, supplied)

    def complete(variant: Variant, settings: Mapping[str, Value]) -> Config:
        chosen = {**base, "rounds": rounds[variant.name], **settings, "method": variant.method}
        return configuration.resolve(chosen, strict=False)

    completed = {variant.name: complete(variant, variant.settings) for variant in variants}
    first = supplied.tested(complete(variants[0], {}))
    for_all = {key: value for key, value in first.flat().items() if "." not in key}
    for key in ("public-samples", "closing-epochs"):
        for_all[key] = max(each.flat()[key] for each in completed.values())

    own: dict[str, dict[str, Value]] = {}
    equalised, notes = set(), []
    for variant in variants:
        name, config_of = variant.name, completed[variant.name]
        settings = {key: value for key, value in config_of.flat().items() if key.startswith(f"{config_of.family}.")}
        settings |= {"method": variant.method, "rounds": rounds[name], **variant.settings}
        configs = [configuration.resolve({**for_all, **settings, "seed": seed}, strict=False) for seed in seeds]
        if supplied.model is None and any(map(population.must_be_equal, configs)):
            equalised.add(name)
            settings |= {"architectures": EQUAL_MODEL, "assign": "round-robin"}
        own[name] = settings
        if 0 in rounds.values() and rounds[name] and "rounds" not in variant.settings:
            settling = next(other for other, each in completed.items() if not each.rounds)
            one_shot = registry.method(variant.method).one_shot
            why = "all that a one-shot method needs" if one_shot else f"as many as {settling} needs"
            notes.append(f"{name}: rounds = {rounds[name]}, {why}")
    notes += [why for key, why in first.idle if key == "test-on"]
    fixed = {variant.name: frozenset(variant.settings) for variant in variants}
    return SharedSettings(for_all, own, fixed, frozenset(equalised), notes, supplied)


def _preset(base: Mapping[str, Any]) -> dict[str, Any]:
    return configuration.read(configuration.preset_path(str(base["preset"]))) if base.get("preset") else {}


def _method_keys_of_presets(variants: Sequence[Variant], base: Mapping[str, Any]) -> dict[str, Any]:
    """The methods' own keys from their presets of the same name as the one for all, as in a run of each."""
    for_all, own = _preset(base), dict[str, Any]()
    name = str(base.get("preset", "")).rpartition("/")[2]
    for prefix in {registry.method(variant.method).family for variant in variants}:
        if name and f"{prefix}/{name}" in configuration.presets():
            settings = _preset({"preset": f"{prefix}/{name}"})
            own |= {key: settings[key] for key in settings.keys() - for_all.keys() if key.startswith(f"{prefix}.")}
    return own


def _rounds(variants: Sequence[Variant], base: Mapping[str, Any], supplied: Supplied) -> dict[str, int]:
    """The key `rounds` for each variant."""
    methods = {variant.name: registry.method(variant.method) for variant in variants}
    own = {variant.name: int(variant.settings["rounds"]) for variant in variants if "rounds" in variant.settings}
    for_all = {"rounds": Config.rounds, **methods[variants[0].name].common, **_preset(base), **base}["rounds"]
    if for_all != 0:
        return dict.fromkeys(methods, for_all) | own
    settling = next((variant for variant in variants if methods[variant.name].settles_rounds), None)
    if settling is None:
        names = ", ".join(methods)
        raise ConfigError(f"rounds = 0: none of {names} settles by itself how many it needs: set rounds")
    rounds = {name: 0 if method.settles_rounds else 1 for name, method in methods.items()} | own
    if others := [name for name, method in methods.items() if rounds[name] and not method.one_shot and name not in own]:
        chosen = {**base, **settling.settings, "method": settling.method, "rounds": 0}
        rounds |= dict.fromkeys(others, settled_rounds(configuration.resolve(chosen, strict=False), supplied))
    return rounds


def settled_rounds(config: Config, supplied: Supplied = Supplied()) -> int:  # noqa: B008 - it is frozen
    """Ask a method for the rounds it needs: clients shake hands, untrained; a `FedhetError` if none can serve."""
    public = population.public_dataset(config) if supplied.data is None else None
    rounds: int = shake_hands(config, supplied, public).config.rounds
    return rounds


def shake_hands(
    config: Config,
    supplied: Supplied,
    public: PublicDataset | None,
    node_config: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Have the clients, each started with `node_config`, shake hands with the method's strategy, and return it.

    A `FedhetError` says that none can serve.
    """
    with tempfile.TemporaryDirectory() as folder, process_restored():
        config = config.but(state_dir=folder, out="")
        strategy = registry.strategy(config.method_name)(config, public=public, model=supplied.model)
        app = make_client_app(supplied.model, supplied.data, task=supplied.task)
        strategy.handshake(LocalGrid(app, config.clients, node_config=node_config))
        return strategy


def distinct(values: Iterable[Any]) -> list[Any]:
    """The values without repetitions, in their order."""
    return list(dict.fromkeys(values))

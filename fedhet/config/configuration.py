"""Resolve settings to a valid `Config`: values are typed and checked, and all problems are reported at once.

The same keys are used in TOML files, in `--set key=value` and in Flower's run config. A method's own keys have its name
as a prefix (`fedhenn.eta0`); they are the fields of its `Options`. Values come from the user, else from the preset (a
file in `run_configs/`), else from the method (the values of its publication), else from the defaults of `Config`.
"""

import dataclasses
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedhet.config import toml
from fedhet.config.validation import SUPPLIED, conflicts, effective
from fedhet.errors import ConfigError, nearest
from fedhet.methods import registry
from fedhet.methods.method import Method
from fedhet.methods.options import (
    OWN,
    Config,
    KeyRow,
    Origin,
    Value,
    checked,
    default_of,
    fields_of,
    keys_that,
    rows_about,
)
from fedhet.utils.files import expanded
from fedhet.utils.text import log

DEFAULT_PRESET = "fedhenn/digits"
OWN_SETTINGS: Mapping[str, Value] = {
    **{"clients": 10, "fraction-train": 1.0, "rounds": 20, "local-epochs": 5, "closing-epochs": 0, "batch-size": 10},
    **{"optimizer": "adam", "learning-rate": 0.003, "lr-schedule": "constant", "weight-decay": 0.0},
}
"""Default settings for a user's own models and data (preset `own`); `Method.own` replaces some for a method."""

OWN_SGD: Mapping[str, Value] = {"optimizer": "sgd", "learning-rate": 0.05, "momentum": 0.5}
"""Values that replace defaults if the user chooses SGD, or sets learning-rate or momentum but no optimizer."""

EXTRA = "extra-keys"
"""Key of Flower's run config whose value, TOML text, sets keys that the app's pyproject.toml does not declare."""


def resolve(
    settings: Mapping[str, Any],
    *,
    over: Mapping[str, Any] = MappingProxyType({}),
    origin: Origin = "code",
    strict: bool = True,
    trusted: bool = True,
    supplied: Collection[str] = (),
) -> Config:
    """Return the complete configuration for a user's settings; raises a ConfigError that lists all problems.

    Args:
        settings: keys and their values, also in nested tables; a value `""` means not set.
        over: keys on the command line, which replace those in `settings`.
        origin: where `settings` were set; if they have a value for every key, a run wrote them.
        strict: raise an error for keys that the user set without effect; otherwise reset them, with a remark in the
            result. Keys that those in `over` make ineffective are reset in any case.
        trusted: whether `package.module:name` or `FILE.py:NAME` may be imported; False for received settings.
        supplied: names of the arguments that the user passes in Python, such as `data`, and that replace keys.
    """
    wanted = toml.chosen(settings)
    origins: dict[str, Origin] = dict.fromkeys(wanted, origin_of(wanted, origin))
    for key, value in toml.chosen(over).items():
        wanted[key] = value
        origins[key] = "command"
    for key in ("preset", EXTRA, "method"):
        if not isinstance(wanted.get(key, ""), str):
            name = getattr(wanted[key], "__name__", "NAME")
            raise ConfigError(f"{key} must be a string: give a name (fedhet list) or, of a class, 'FILE.py:{name}'")
    if extra := wanted.pop(EXTRA, None):
        origin = origins.pop(EXTRA)
        try:
            more = toml.chosen(tomllib.loads(extra))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{EXTRA} = {extra!r}: must be TOML, such as 'mine.weight = 0.1': {error}") from error
        wanted |= more
        origins |= dict.fromkeys(more, origin)
    name = wanted.pop("preset", "")
    preset = preset_settings(name)
    origins = {**dict.fromkeys(preset, "preset"), **origins}
    return _checked({**preset, **wanted}, origins, name, strict=strict, trusted=trusted, supplied=supplied)


def configure(
    source: Mapping[str, Any] | str | Path | None,
    over: Mapping[str, Any] = MappingProxyType({}),
    supplied: Collection[str] = (),
) -> Config:
    """Return the configuration of a new run: the settings in `source` (see `settings_of`), and `over` (see `resolve`).

    `supplied` has the names of the arguments that the user passes in Python, such as `data`.
    """
    settings = settings_of(source, supplied, over.get("method"))
    if source is not None and settings["preset"] and "preset" in over:
        raise ConfigError(f"{source} is a preset, and --set preset names another preset: give only one of them")
    origin: Origin = "file" if isinstance(source, str | Path) else "code"
    return resolve(settings, over=over, origin=origin, supplied=supplied)


def of_run(folder: Path, supplied: Collection[str] = (), changes: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """Return the configuration of the run in `folder`, with `changes`; only a method in `changes` may be imported."""
    settings = from_file(folder / "config.toml", supplied, changes.get("method"))
    return resolve({**settings, **changes}, origin="run", strict=False, trusted=False)


def origin_of(keys: Collection[str], otherwise: Origin = "code") -> Origin:
    """Return "run" if there is a value for every key, as only runs write, or else `otherwise`."""
    written = {
        key
        for key, spec in fields_of(Config).items()
        if default_of(spec) != "" and not spec.metadata["replaced_by"] and key not in ("clients", "resume")
    }
    return "run" if written <= {*keys} else otherwise


def changed(
    config: Config, settings: Mapping[str, Any], origin: Origin, *, strict: bool = False, trusted: bool = True
) -> Config:
    """Return `config` with other values of the keys in `settings`, whose origin is `origin`; see `resolve`."""
    origins = {**config.origins, **dict.fromkeys(settings, origin)}
    values = toml.chosen({**config.flat(), **settings})
    return _checked(values, origins, config.preset, strict=strict, trusted=trusted)


@lru_cache(maxsize=256)
def parse(text: str) -> Config:
    """Return the configuration that a message contains as JSON (`Config.text`); the result is cached."""
    settings = toml.from_json(text, "the request's settings")
    return resolve(settings, origin="run", strict=False, trusted=False)


@lru_cache(maxsize=256)
def at_node(text: str, node: tuple[tuple[str, Any], ...], *, here: bool) -> Config:
    """Return a node's configuration: the server's (`text`, see `Config.text`), updated by `node`'s (key, value) pairs.

    `here` says whether server and node run on one machine or cluster. If not, paths set by the server are removed.
    """
    config = parse(text)
    paths = {} if here else {key: "" for key in keys_that("path") if config.flat()[key] != ""}
    return changed(config, {**paths, **dict(node)}, "node", trusted=False) if node or paths else config


def _checked(
    values: Mapping[str, Any],
    origins: Mapping[str, Origin],
    preset: str,
    *,
    strict: bool,
    trusted: bool,
    supplied: Collection[str] = (),
) -> Config:
    """Return the configuration with these values by key, and defaults of method and preset for all other keys."""
    problems: list[str] = []
    method: Method | None = None
    try:
        method = registry.method(str(values.get("method", Config.method)), trusted=trusted)
    except ConfigError as error:
        problems.append(str(error))
    defaults = own_settings(method, values) if method and preset == OWN else {}
    common, method_values = _values_of(method, {**defaults, **values}, problems)
    # A node's own settings have no path of the server.
    evaluates = common.get("start_from") or "node" in origins.values() or (method and method.name == "local")
    if method and common.get("rounds") == 0 and not (method.settles_rounds or evaluates):
        problems.append(
            f"rounds = 0: {method.name} does not determine the number of rounds itself: set at least 1, or give the "
            "models to evaluate (start-from)"
        )
    problems += conflicts(common)
    if problems or method is None:
        raise ConfigError("\n".join(problems))
    config = Config(
        **common,
        options=method.Options(**method_values),
        method_name=method.name,
        family=method.family,
        preset=preset,
        origins=origins,
    )
    traits = method.traits_of(config.options)
    # Clients that join after the last round need weights from the server, unless they need no server at all.
    can_join = not traits.communicates or traits.scored == "received" or traits.averages_model
    if config.unseen_clients and not can_join:
        raise ConfigError(
            f"unseen-clients = {config.unseen_clients}: {method.name} has no weights for clients that join after the "
            "last round: leave the key out, or use a method that averages or generates weights, such as layer-average"
        )
    config.options.check(config)
    return effective(config, traits, {part for part in SUPPLIED if part in supplied}, strict=strict)


def _values_of(
    method: Method | None, layers: Mapping[str, Any], problems: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in {**(method.common if method else {}), **layers}.items():
        try:
            spec = _spec(key)
            values[key.rpartition(".")[0]][spec.name] = checked(key, value, spec)
        except ConfigError as error:
            problems.append(str(error))
    return values[""], values[method.family] if method else {}


def _spec(key: str) -> dataclasses.Field[Any]:
    prefix, _, name = key.rpartition(".")
    try:
        options: Any = registry.method(prefix, trusted=False).Options if prefix else Config
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    fields = fields_of(options)
    if key in ("task", "model"):
        raise ConfigError(
            f"{key} is not a key but an argument of fedhet.run, fedhet.compare and fedhet.make_client_app: "
            f"pass {key}=... to one of them"
        )
    if name not in fields:
        raise ConfigError(nearest("key", key, [f"{prefix}.{field}" if prefix else field for field in fields]))
    return fields[name]


def run_configs() -> Path:
    """Return the folder of presets: inside an installed package, or next to the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next(p for p in (package / "run_configs", package.parent / "run_configs") if p.is_dir())


def presets() -> list[str]:
    """Return the names of all presets."""
    folder = run_configs()
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("*/*.toml"))


def preset_settings(name: str) -> dict[str, Any]:
    """Return the settings in a preset's file, or {} for `""` or `own` (a user's models and data), which have none."""
    name = name.removesuffix(".toml")
    if name in ("", OWN):
        return {}
    if name not in (files := presets()):  # also a path outside of the folder: a name may come from a message
        raise ConfigError(nearest("preset", name, files))
    return read(run_configs() / f"{name}.toml")


def own_settings(method: Method, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's default settings for a user's own models and data: with SGD or, by default, Adam.

    SGD is used if `chosen`, the user's settings, have it or have `learning-rate` or `momentum` without `optimizer`.
    """
    sgd = chosen.get("optimizer", "sgd" if {"learning-rate", "momentum"} & chosen.keys() else "adam") == "sgd"
    return {**OWN_SETTINGS, **method.own, **(OWN_SGD if sgd else {})}


def settings_of(
    source: Mapping[str, Any] | str | Path | None, supplied: Collection[str] = (), method: object = None
) -> dict[str, Any]:
    """Return the settings in `source`: a mapping, a TOML file, or the name of a preset or method.

    A mapping without the key `preset` gets the preset of its method. A method's preset is `NAME/digits`, or `own`
    (defaults for a user's models and data) if `supplied`, the names of the arguments that the user passes in Python,
    has `model` and `data`. If `source` is None, the preset is that of `method`, a method's name, or `fedhenn/digits`.
    If it is a file, `method` replaces the method in the file. Raises a ConfigError if a name is unknown.
    """
    if isinstance(source, Mapping):
        return {**({} if "preset" in source else settings_of(None, supplied, source.get("method"))), **source}
    source = expanded(source) if source is not None and str(source).startswith("~") else source
    if source is not None and (str(source).endswith(".toml") or Path(source).is_file()):
        if (path := Path(source).resolve()).is_relative_to(folder := run_configs().resolve()):
            return {"preset": path.relative_to(folder).as_posix()}
        return {"preset": ""} | from_file(Path(source), supplied, method)
    names = presets()
    wanted = str(source or method)
    by_reference = ":" in wanted
    family = registry.method(wanted).family if by_reference else wanted
    of_method = source is None or by_reference or wanted in registry.methods()
    if of_method and {"model", "data"} <= {*supplied}:
        return {"preset": OWN} | ({} if source is None else {"method": wanted})
    for name in (f"{family}/digits", DEFAULT_PRESET if source is None or by_reference else wanted):
        if name in names:
            return {"preset": name} | ({"method": wanted} if source is not None and by_reference else {})
    if source is not None and ((path := Path(source)).is_dir() or path.suffix):
        what = "a folder (to continue the run there, use resume)" if path.is_dir() else "not an existing file"
        raise ConfigError(f"cannot start a run from {source}, {what}: give a TOML file, preset or method (fedhet list)")
    if wanted in registry.methods():
        raise ConfigError(
            f"the method {wanted} has no preset {wanted}/digits: name another preset and the method, such as "
            f"local/digits --set method={wanted}"
        )
    message = nearest("method or preset", str(source), [*names, *registry.methods()])
    raise ConfigError(f"{message}; `fedhet list` prints all of them")


class NotPassed(ConfigError):
    """Raised if a run used a user's own model or data, and the user does not pass them again."""


def read(path: Path, supplied: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings in a configuration file, without the tables that a run adds, such as `versions`.

    Raises a ConfigError if the file cannot be read, in particular a `NotPassed` if it is from a run with a user's own
    model or data, and the user does not pass these arguments again (names in `supplied`).
    """
    table = toml.load(path)
    notes = [table.pop(noted, {}) for noted in toml.NOTED][-1]
    if missing := {name: text for name, text in notes.items() if name not in ("task", *supplied)}:
        words = " and ".join(f"{name} ({text})" for name, text in missing.items())
        again = ", ".join(f"{name}=..." for name in missing)
        raise NotPassed(
            f"the run of {path} used your own {words}: in Python, fedhet.run({str(path)!r}, {again}) repeats the run, "
            f"and fedhet.run(resume={str(path.parent)!r}, {again}) continues it"
        )
    settings = toml.chosen(table)
    if EXTRA in settings:  # it could hide keys from checks, such as the method of another person's run
        raise ConfigError(f"{path}: {EXTRA} is for Flower's run config only: write the keys into the file instead")
    return settings


def from_file(path: Path, supplied: Collection[str] = (), method: object = None) -> dict[str, Any]:
    """Return the settings in a configuration file; `method`, unless None, replaces the method in the file.

    If a run wrote the file, its method is not imported, since the code may not be trusted: raises a ConfigError if the
    method is unknown. Raises a ConfigError as well if the run used an argument, such as `model`, that the user does not
    pass in Python again; `supplied` has the names of those that the user passes.
    """
    settings = read(path, supplied)
    if method is not None:
        return settings | {"method": method}
    by_run = (path.parent / "history.jsonl").exists() or "ran" in toml.load(path)
    if by_run and "method" in settings:
        registry.check_known(str(settings["method"]), path)
    return settings


def keys(*, outside: bool = True, method: str | None = None) -> Iterator[KeyRow]:
    """Yield the keys that only `method` has, or all keys; without `outside`, no keys of methods outside fedhet."""
    if method is None:
        yield from rows_about(Config)
    every = registry.methods() if outside else registry.own_methods()
    for name in every if method is None else [method]:
        try:
            yield from registry.key_rows(name)
        except ConfigError as error:  # an installed package that is broken
            log.warning("%s", error)


def key_groups(word: str | None = None) -> dict[str, list[KeyRow]]:
    """Return the configuration keys by group: a subject such as `about data`, or a method's name.

    `word` is a method or a text in keys' names or descriptions. Raises a ConfigError if no key matches.
    """
    method = word if word and (":" in word or word in registry.methods()) else None
    about = {key: f"about {field.metadata['about']}" for key, field in fields_of(Config).items()}
    groups: dict[str, list[KeyRow]] = {title: [] for title in about.values()}
    for row in keys(method=method):
        if method or not word or word.lower() in f"{row[0]} {row[3]}".lower():
            groups.setdefault(about.get(row[0], row[0].rpartition(".")[0]), []).append(row)
    if not any(groups.values()) and word and not method:
        raise ConfigError(nearest("method or key", word, [*registry.methods(), *(row[0] for row in keys())]))
    return {name: rows for name, rows in groups.items() if rows}

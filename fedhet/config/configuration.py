"""Configuration: one flat set of kebab-case keys, typed, checked at one place, all problems reported at once.

The same keys stand in TOML files, in `--set key=value` and in Flower's run config. A method's own keys stand under
its name (`fedhenn.eta0`); they are the fields of its `Parameters`. Precedence: what the user set, then the preset (a
file in `run_configs/`), then the method's values (the paper's), then the defaults of `Config`.
"""

import dataclasses
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fedhet.config import toml
from fedhet.config.validation import conflicts, effective
from fedhet.errors import ConfigError, nearest
from fedhet.methods import registry
from fedhet.methods.keys import checked, default_of, fits, kebab, takes
from fedhet.methods.method import Method
from fedhet.methods.options import OWN, Config, Value, fields_of
from fedhet.utils.text import log

DEFAULT_PRESET = "fedhenn/digits"
OWN_SETTINGS: Mapping[str, Value] = {
    **{"clients": 10, "fraction-train": 1.0, "rounds": 20, "local-epochs": 5, "closing-epochs": 0, "batch-size": 10},
    **{"optimizer": "adam", "learning-rate": 0.003, "lr-schedule": "constant"},
}
"""Settings of the preset `own`, for a user's own networks and data; a method may differ (`Method.own`)."""

OWN_SGD: Mapping[str, Value] = {"optimizer": "sgd", "learning-rate": 0.05, "momentum": 0.5}
"""Settings that take their place if a user chooses SGD, or sets learning-rate or momentum without an optimiser."""

EXTRA = "extra-keys"
"""Key under which Flower's run config, which takes declared keys only, carries those of a method from outside."""

ARGUMENTS = ("task", "model")
"""Arguments of `fedhet.run` that are given beside the configuration."""

KeyRow = tuple[str, Value, str, str]
"""A key, its default, the values that it takes, and its meaning."""


def resolve(
    chosen: Mapping[str, Any], *, strict: bool = True, over: Collection[str] = (), trusted: bool = True
) -> Config:
    """Complete and check the settings of a user; keys of a preset that lose their effect get their defaults.

    Args:
        chosen: kebab-case keys and values; nested tables count as dotted keys, `""` as not chosen. `preset` names a
            file of `run_configs/` without its suffix, `extra-keys` is TOML with the keys of an outside method.
        strict: whether keys of the user without effect are refused; else they get their defaults, and a remark.
        over: keys that were set over those of a file, which may lose their effect by it.
        trusted: whether a method may be imported by `package.module:name`; False for names received from the wire.

    Raises:
        ConfigError: lists every problem, each with its key and what would be right.
    """
    wanted = flattened(chosen)
    for key in ("preset", EXTRA, "method"):
        if not isinstance(wanted.get(key, ""), str):
            raise ConfigError(f"{key}: must be text, not {type(wanted[key]).__name__}")
    if extra := wanted.pop(EXTRA, None):
        wanted |= _extra(extra)
    preset = preset_settings(wanted.get("preset", ""))
    layers = {**preset, **wanted}
    layers.pop("preset", None)
    problems: list[str] = []
    method: Method | None = None
    try:
        method = registry.method(str(layers.get("method", Config.method)), trusted=trusted)
    except ConfigError as error:
        problems.append(str(error))
    defaults = own_settings(method, wanted) if method and wanted.get("preset") == OWN else {}
    common, method_values = _values_of(method, {**defaults, **layers}, problems)
    if method and common.get("rounds") == 0 and not method.settles_rounds:
        problems.append(f"rounds = 0: {method.name} does not settle by itself how many it needs: set at least 1")
    problems += conflicts(common, numbers=not problems)
    if problems or method is None:
        raise ConfigError("\n".join(problems))
    config = Config(
        **common,
        parameters=method.Parameters(**method_values),
        method_name=method.name,
        family=method.family,
        preset=wanted.get("preset", ""),
        chosen=frozenset(wanted),
    )
    if config.unseen_clients and not method.traits_of(config.parameters).starts_unseen_clients:
        raise ConfigError(
            f"unseen-clients = {config.unseen_clients}: {method.name} has no weights to give a client that comes after "
            "the last round: leave it out, or take a method that averages or writes them, such as layer-average or "
            "flha-ghn"
        )
    config.parameters.check(config)
    chosen_keys = (wanted if strict else layers).keys()
    return effective(config, method.traits_of(config.parameters), chosen_keys, strict=strict, over=over)


def flattened(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a user by keys as they are written in files, without those that are `""`."""
    return {_key(key): value for key, value in toml.chosen(chosen).items()}


def _values_of(
    method: Method | None, layers: Mapping[str, Any], problems: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of common fields and of the method's fields; errors are added to `problems`."""
    common: dict[str, Any] = {}
    method_values: dict[str, Any] = {}
    for key, value in {**(method.common if method else {}), **layers}.items():
        prefix, _, name = key.rpartition(".")
        try:
            spec = _spec(key, prefix, name)
            value = checked(key, value, spec)
        except ConfigError as error:
            problems.append(str(error))
            continue
        if not prefix:
            common[spec.name] = value
        elif method and prefix == method.family:
            method_values[spec.name] = value
    return common, method_values


def named(config: str | Path | None, method: object = None, supplied: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings for a name, to which single keys are added; raises a ConfigError for an unknown one.

    Args:
        config: a TOML file (one of `run_configs` is a preset), a preset, or a method, which stands for its digits
            preset or for that of its family, or for `own` if both model and data are supplied; None for `method`.
        method: the method that is set by hand.
        supplied: as in `read`.
    """
    if config is not None and (str(config).endswith(".toml") or Path(config).is_file()):
        if (path := Path(config).resolve()).is_relative_to(folder := run_configs().resolve()):
            return {"preset": path.relative_to(folder).as_posix()}
        return {"preset": ""} | from_file(Path(config), supplied, method)
    known, wanted = presets(), str(config or method)
    family = registry.method(wanted).family if ":" in wanted else wanted
    by_reference = {"method": wanted} if config is not None and ":" in wanted else {}
    if {"model", "data"} <= {*supplied} and (config is None or ":" in wanted or wanted in registry.methods()):
        return {"preset": OWN} | ({} if config is None else {"method": wanted})
    for name in (f"{family}/digits", DEFAULT_PRESET if config is None or by_reference else wanted):
        if name in known:
            return {"preset": name} | by_reference
    raise ConfigError(nearest("method or preset", str(config), [*known, *registry.methods()]) + " (fedhet list)")


def completed(config: Mapping[str, Any] | str | Path | None, supplied: Collection[str] = ()) -> dict[str, Any]:
    """Complete settings from Python: single ones by the preset that they name or their method's, names by `named`."""
    if not isinstance(config, Mapping):
        return named(config, supplied=supplied)
    return {**({} if "preset" in config else named(None, config.get("method"), supplied)), **config}


def read(path: Path, supplied: Collection[str] = ()) -> dict[str, Any]:
    """Return the chosen keys of a configuration file, flat, without the notes that a run adds.

    Args:
        path: the file.
        supplied: which of `model` and `data` the user supplies again, for the file of a run that had them.

    Raises:
        ConfigError: the file is missing or is not TOML, or its run had a model or data that are not supplied again.
    """
    table = toml.load(path)
    notes = [table.pop(noted, {}) for noted in toml.NOTED][-1]
    if missing := {name: text for name, text in notes.items() if name in ("model", "data") and name not in supplied}:
        words = " and ".join(f"{'a ' * (name == 'model')}{name} of its own ({text})" for name, text in missing.items())
        again = ", ".join(f"{name}=..." for name in missing)
        raise ConfigError(f"{path} was run with {words}: give it again in Python, fedhet.run({str(path)!r}, {again})")
    return toml.chosen(table)


def from_file(
    path: Path, supplied: Collection[str] = (), method: object = None, *, of_run: bool = False
) -> dict[str, Any]:
    """Return the settings of a file that a user names.

    Args:
        path: the file.
        supplied: as in `read`.
        method: the method that is set by hand, which replaces the file's.
        of_run: whether to treat the file as untrusted, like a file in the folder of a run: no method is imported.

    Raises:
        ConfigError: as in `read`, or a file of a run names a method that is neither known here nor set by hand.
    """
    settings = read(path, supplied)
    if not of_run and not (path.parent / "history.jsonl").exists() and "ran" not in toml.load(path):
        return settings
    if EXTRA in settings:
        raise ConfigError(f"{path}: {EXTRA} is of Flower's run config, and no key of a run's own configuration")
    if method is not None:
        return settings | {"method": method}
    if "method" in settings:
        registry.of_data(str(settings["method"]), path)
    return settings


@cache
def parse(text: str) -> Config:
    """The configuration that `Config.text` wrote; cached, since every message carries it."""
    return resolve(toml.from_json(text, "the request's settings"), strict=False, trusted=False)


def run_configs() -> Path:
    """The folder of presets: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next(p for p in (package / "run_configs", package.parent / "run_configs") if p.is_dir())


def presets() -> list[str]:
    """Names of all presets."""
    folder = run_configs()
    paths = sorted((*folder.glob("*.toml"), *folder.glob("*/*.toml")))
    return [path.relative_to(folder).with_suffix("").as_posix() for path in paths]


_presets_so_far = cache(lambda: frozenset(presets()))


def preset_settings(name: str) -> dict[str, Any]:
    """Return the settings of a preset's file; without one (``""``, `own`) there are none. Raises as `preset_path`."""
    return {} if name in ("", OWN) else read(preset_path(name))


def own_settings(method: Method, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the preset `own` for a method and what the user chose."""
    sgd = chosen.get("optimizer", "sgd" if {"learning-rate", "momentum"} & chosen.keys() else "adam") == "sgd"
    return {**OWN_SETTINGS, **method.own, **(OWN_SGD if sgd else {})}


def preset_path(name: str) -> Path:
    """Return the file of a preset, by its name or path; raises a ConfigError with the nearest name if there is none."""
    name = name.removesuffix(".toml")
    # A name may come over the wire, and must lead nowhere else.
    if name not in _presets_so_far() and name not in (known := presets()):
        raise ConfigError(nearest("preset", name, known))
    return run_configs() / f"{name}.toml"


def parse_settings(texts: Iterable[str]) -> dict[str, Value]:
    """Several `KEY=VALUE` of a command line; a ConfigError if one lacks key or value, or a key is set twice."""
    chosen: dict[str, Value] = {}
    for text in texts:
        key, value = parse_setting(text)
        if value == "":
            raise ConfigError(f"--set {text}: there is no value; write KEY=VALUE, or leave the key out for its default")
        if key in chosen:
            raise ConfigError(f"--set {text}: {key} is set twice, to {chosen[key]!r} before; set it once")
        chosen[key] = value
    return chosen


def parse_setting(text: str) -> tuple[str, Value]:
    """`KEY=VALUE` of a command line, the value TOML or else text; a ConfigError without `=` or a key before it."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: write KEY=VALUE, such as rounds=5")
    number = re.sub(r"^([+-]?)\.(?=\d)", r"\g<1>0.", value.strip())  # people write .05, TOML 0.05
    try:
        parsed = tomllib.loads(f"value = {number}")["value"]
    except (ValueError, RecursionError):  # also of numbers of thousands of digits, and of what is nested as deeply
        parsed = None
    if type(parsed) is int and not fits(parsed):
        parsed = None
    # Dates and lists are TOML as well, but no key takes them.
    return _key(key.strip()), parsed if isinstance(parsed, Value) else value


def keys(*, outside: bool = True, method: str | None = None) -> Iterator[KeyRow]:
    """Yield every key, methods' keys last, with those of `outside` methods, or only those of one `method`."""
    if method is not None:
        names = [registry.method(method).family]
    else:
        names = registry.methods() if outside else registry.own_methods()
        yield from _rows("", Config)
    for name in names:
        try:
            yield from _rows(f"{name}.", registry.method(name).Parameters)
        except ConfigError as error:  # a package that is installed and broken
            log.warning("%s", error)


def _rows(prefix: str, options: type) -> Iterator[KeyRow]:
    for key, field in fields_of(options).items():
        yield prefix + key, default_of(field), takes(field), field.metadata["help"]


def key_groups(word: str | None = None) -> dict[str, list[KeyRow]]:
    """Group `keys` by subject or method; optionally only those of a method, or with a word in name or meaning.

    A word that is in none is a ConfigError, with the nearest names.
    """
    method = word if word and (":" in word or word in registry.methods()) else None
    about = {key: f"about {field.metadata['about']}" for key, field in fields_of(Config).items()}
    groups: dict[str, list[KeyRow]] = {each: [] for each in about.values()}
    for row in keys(method=method):
        if method or not word or word.lower() in f"{row[0]} {row[3]}".lower():
            groups.setdefault(about.get(row[0], row[0].rpartition(".")[0]), []).append(row)
    if not any(groups.values()) and word and not method:
        raise ConfigError(nearest("method or key", word, [*registry.methods(), *(row[0] for row in keys())]))
    return {name: rows for name, rows in groups.items() if rows}


def _key(key: str) -> str:
    """Return a key as it is written in files; Python's underscores become hyphens."""
    prefix, dot, name = key.rpartition(".")
    return f"{prefix}{dot}{kebab(name)}"


def _extra(text: str) -> dict[str, Any]:
    try:
        return toml.chosen(tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{EXTRA} = {text!r}: must be TOML, such as 'mine.weight = 0.1': {error}") from error


ELSEWHERE = {
    "lr": "learning-rate",
    "num-clients": "clients",
    "num-rounds": "rounds",
    "num-server-rounds": "rounds",
    "epochs": "local-epochs",
    "fraction-fit": "fraction-train",
    "lambda": "weight",
}
"""Names that Flower's examples and papers give keys."""


def _spec(key: str, prefix: str, name: str) -> dataclasses.Field[Any]:
    """Return the field of a key; raises a ConfigError with the nearest key if there is none."""
    try:
        options: Any = registry.method(prefix, trusted=False).Parameters if prefix else Config
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    known = fields_of(options)
    if key in ARGUMENTS:
        raise ConfigError(
            f"{key} is no key of the configuration but an argument: give it to fedhet.run(..., {key}=...), "
            "fedhet.compare or fedhet.make_client_app"
        )
    if (ours := ELSEWHERE.get(name)) in known and name not in known:
        raise ConfigError(f"unknown key {key!r}; did you mean {f'{prefix}.{ours}' if prefix else ours!r}?")
    if name not in known:
        raise ConfigError(nearest("key", key, [f"{prefix}.{each}" if prefix else each for each in known]))
    return known[name]

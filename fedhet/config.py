"""Configuration: one flat set of kebab-case keys, typed, checked at one place, all problems reported at once.

The same keys stand in TOML files, in `--set key=value` and in Flower's run config. A method's own keys stand under
its name (`fedhenn.eta0`); they are the fields of its `Parameters`. Precedence: what the user set, then the preset (a
file in `run_configs/`), then the method's values (the paper's), then the defaults of `Config`.
"""

import dataclasses
import logging
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from fedhet import registry, toml
from fedhet.config_files import EXTRA, from_file, from_run
from fedhet.errors import ConfigError, FedhetError, nearest
from fedhet.idle import without_idle
from fedhet.keys import checked, default_of, fits, kebab, takes
from fedhet.machine import check_device_name
from fedhet.method import Method
from fedhet.options import Config, Parameters, Value, common_fields, listed, option
from fedhet.toml import read, to_toml, toml_value

__all__ = [
    "EXTRA",
    "Config",
    "Parameters",
    "Value",
    "from_file",
    "from_run",
    "keys",
    "named",
    "option",
    "parse",
    "parse_setting",
    "parse_settings",
    "preset_path",
    "presets",
    "read",
    "resolve",
    "run_configs",
    "to_toml",
    "toml_value",
]

log = logging.getLogger("flwr").getChild("fedhet")

DEFAULT_PRESET = "fedhenn/digits"
LOGS = ("tensorboard", "wandb", "mlflow")
"""What the key `log` takes; `fedhet.results.loggers` has an observer for each."""


def resolve(chosen: Mapping[str, Any], *, strict: bool | Collection[str] = True, trusted: bool = True) -> Config:
    """Complete and check what a user set.

    A key that has no effect beside another one is put back to its default, and listed in `Config.idle`.

    Args:
        chosen: kebab-case keys and values; nested tables count as dotted keys, `""` as not chosen. `preset` names a
            file of `run_configs/` without its suffix, `extra-keys` is TOML with the keys of a method from outside.
        strict: refuse a key without effect that the user chose by hand, unless a preset or a file chose the key that is
            the reason: any (`True`), none, or only these keys.
        trusted: whether a method may be imported by `package.module:name`; not where the name came over the wire.

    Raises:
        ConfigError: with every problem found, each naming its key and what would be right.
    """
    wanted = {_key(key): value for key, value in toml.chosen(chosen).items()}
    for key in ("preset", EXTRA, "method"):
        if not isinstance(wanted.get(key, ""), str):
            raise ConfigError(f"{key}: must be text, not {type(wanted[key]).__name__}")
    if extra := wanted.pop(EXTRA, None):
        wanted |= _extra(extra)
    preset = read(preset_path(wanted["preset"])) if wanted.get("preset") else {}
    layers = {**preset, **wanted}
    layers.pop("preset", None)
    problems: list[str] = []
    method: Method | None = None
    try:
        method = registry.method(str(layers.get("method", Config.method)), trusted=trusted)
    except ConfigError as error:
        problems.append(str(error))
    common, own = _values_of(method, layers, problems)
    if method and common.get("rounds") == 0 and not method.settles_rounds:
        problems.append(f"rounds = 0: {method.name} does not settle by itself how many it needs: set at least 1")
    problems += _conflicts(common, numbers=not problems)
    if problems or method is None:
        raise ConfigError("\n".join(problems))
    config = Config(
        **common,
        parameters=method.Parameters(**own),
        method_name=method.name,
        family=method.family,
        chosen=frozenset(wanted),
    )
    if config.unseen_clients and not method.traits_of(config.parameters).starts_unseen_clients:
        raise ConfigError(
            f"unseen-clients = {config.unseen_clients}: {method.name} has no weights to give a client that comes after "
            "the last round: leave it out, or take a method that averages or writes them, such as layer-average or "
            "flha-ghn"
        )
    config.parameters.check(config)
    by_hand = wanted.keys() if strict is True else map(_key, strict or ())
    return without_idle(config, frozenset(by_hand), layers.keys(), method.traits_of(config.parameters))


def _values_of(
    method: Method | None, layers: Mapping[str, Any], problems: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of the common fields, and of the method's own; what is wrong with one is added to `problems`."""
    common: dict[str, Any] = {}
    own: dict[str, Any] = {}
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
            own[spec.name] = value
    return common, own


def named(config: str | Path | None, method: object = None, given: Collection[str] = ()) -> dict[str, Any]:
    """The settings that a name stands for, on top of which single keys are set.

    Args:
        config: a TOML file, a preset, or a method, which stands for its preset on digits or for that of its family;
            None for the preset on digits of `method`, or else the default.
        method: the method that is set by hand.
        given: what of a user's own is given beside it (`fedhet.toml.read`).

    Raises:
        ConfigError: there is no such name; a file is missing, is not TOML, or needs what is not given.
    """
    if config is not None and (str(config).endswith(".toml") or Path(config).is_file()):
        return from_file(Path(config), given, method)
    known, wanted = presets(), str(config or method)
    family = registry.method(wanted).family if ":" in wanted else wanted
    own = {"method": wanted} if config is not None and ":" in wanted else {}
    for name in (f"{family}/digits", DEFAULT_PRESET if config is None or own else wanted):
        if name in known:
            return {"preset": name} | own
    raise ConfigError(nearest("method or preset", str(config), [*known, *registry.methods()]))


def completed(config: Mapping[str, Any] | str | Path | None, given: Collection[str] = ()) -> dict[str, Any]:
    """Settings from Python: single ones on top of the preset on digits of their method, or what a name stands for.

    Args:
        config: settings, which may name a `preset`; or as `named`.
        given: as `named`.

    Raises:
        ConfigError: as `named`.
    """
    if not isinstance(config, Mapping):
        return named(config, given=given)
    base = {} if "preset" in config else named(None, config.get("method"))
    return {**base, **config}


@cache
def parse(text: str) -> Config:
    """The configuration that `Config.text` wrote; cached, since every message carries it."""
    return resolve(toml.from_json(text, "the request's settings"), strict=False, trusted=False)


def run_configs() -> Path:
    """The folder of presets: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    return next(p for p in (package / "run_configs", package.parent / "run_configs") if p.is_dir())


def presets() -> list[str]:
    """Names of all presets."""
    folder = run_configs()
    return [path.relative_to(folder).with_suffix("").as_posix() for path in sorted(folder.rglob("*.toml"))]


def preset_path(name: str) -> Path:
    """The file of a preset.

    Raises:
        ConfigError: there is no such preset; the nearest name is given.
    """
    if name not in (known := presets()):  # which may come over the wire, and must lead nowhere else
        raise ConfigError(nearest("preset", name, known))
    return run_configs() / f"{name}.toml"


def parse_settings(texts: Iterable[str]) -> dict[str, Value]:
    """Several `KEY=VALUE` of a command line; see `parse_setting`.

    Raises:
        ConfigError: there is no key or no value, or a key is set twice.
    """
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
    """`KEY=VALUE` of a command line: the value read as TOML where it is that, else taken as text.

    Raises:
        ConfigError: there is no `=`, or no key before it.
    """
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


def keys(*, outside: bool = True, method: str | None = None) -> Iterator[tuple[str, Value, str, str]]:
    """Every key with its default, the values that it takes and its meaning, the methods' own last.

    Args:
        outside: those of methods from outside too.
        method: those of this method alone.

    Raises:
        ConfigError: there is no such method.
    """
    if method is not None:
        names = [registry.method(method).family]
    else:
        names = registry.methods() if outside else registry.own_methods()
        for f in common_fields():
            yield kebab(f.name), default_of(f), takes(f), f.metadata["help"]
    for name in names:
        try:
            own = fields(registry.method(name).Parameters)
        except ConfigError as error:  # a package that is installed and broken
            log.warning("%s", error)
            continue
        for f in own:
            yield f"{name}.{kebab(f.name)}", default_of(f), takes(f), f.metadata["help"]


def key_groups(*, method: str | None = None, word: str | None = None) -> dict[str, list[tuple[str, Value, str, str]]]:
    """`keys` by subject: what they are about, or the method.

    Args:
        method: those of this method alone.
        word: those with this in their name or meaning alone.

    Raises:
        ConfigError: there is no such method, or no such key; with the nearest names.
    """
    about = {kebab(f.name): f"about {f.metadata['about']}" for f in common_fields()}
    groups: dict[str, list[tuple[str, Value, str, str]]] = {each: [] for each in about.values()}
    for row in keys(method=method):
        if word is None or word.lower() in f"{row[0]} {row[3]}".lower():
            groups.setdefault(about.get(row[0], row[0].rpartition(".")[0]), []).append(row)
    if word and not any(groups.values()):
        raise ConfigError(nearest("method or key", word, [*registry.methods(), *(row[0] for row in keys())]))
    return {name: rows for name, rows in groups.items() if rows}


def _key(key: str) -> str:
    """A key as it is written in files; Python's underscores are understood."""
    prefix, dot, name = key.rpartition(".")
    return f"{prefix}{dot}{kebab(name)}"


def _extra(text: str) -> dict[str, Any]:
    try:
        return toml.chosen(tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{EXTRA} = {text!r}: must be TOML, such as 'mine.weight = 0.1': {error}") from error


def _spec(key: str, prefix: str, name: str) -> dataclasses.Field[Any]:
    """The field behind a key.

    Raises:
        ConfigError: there is none; the nearest key is given.
    """
    try:
        known = common_fields() if not prefix else fields(registry.method(prefix, trusted=False).Parameters)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    found = next((f for f in known if kebab(f.name) == name), None)
    if found is None:
        names = [kebab(f.name) for f in known]
        raise ConfigError(nearest("key", key, [f"{prefix}.{each}" if prefix else each for each in names]))
    return found


def _conflicts(common: Mapping[str, Any], *, numbers: bool) -> list[str]:
    """Problems of names and, unless some of the `numbers` are wrong already, of keys that do not go together."""
    from fedhet import data, models

    config = Config(**common)
    problems = []
    for name in listed(config.log):
        if name not in LOGS:
            problems.append(nearest("log", name, LOGS))
    try:
        check_device_name(config.device)
    except ConfigError as error:
        problems.append(str(error))
    if not re.fullmatch(r"auto|gpu|off|[2-9]|[1-9]\d+", config.client_batching):
        problems.append(
            f"client-batching = {config.client_batching!r}: must be auto, gpu, off, or a number of clients from 2"
        )
    if config.dataset not in data.names():
        problems.append(nearest("dataset", config.dataset, data.names()))
    if config.public_dataset and config.public_dataset not in data.names():
        problems.append(nearest("public-dataset", config.public_dataset, data.names()))
    if config.partition not in data.partitions():
        problems.append(nearest("partition", config.partition, data.partitions()))
    try:
        if numbers:
            models.deal(config.architectures, config.assign, config.clients, config.seed)
        else:
            models.expand(config.architectures)
    except FedhetError as error:
        problems.append(str(error))
    if numbers and config.early_stopping and not config.validation:
        problems.append(f"early-stopping = {config.early_stopping}: needs a validation part, such as validation = 0.2")
    if numbers and config.min_clients > config.clients and "clients" in common:
        problems.append(f"min-clients = {config.min_clients}: must be at most clients = {config.clients}")
    if numbers and config.unseen_clients >= config.clients and "clients" in common:
        problems.append(f"unseen-clients = {config.unseen_clients}: must be fewer than clients = {config.clients}")
    return problems

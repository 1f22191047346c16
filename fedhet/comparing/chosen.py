"""The keys that a user sets for all variants of a comparison, and which of them have no effect."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedhet.config.validation import is_complete
from fedhet.methods import registry
from fedhet.methods.keys import default_of
from fedhet.methods.options import Config, Value, fields_of, keys_about

PLACES = frozenset(keys_about("place"))
"""Keys of where and how a run is carried out, which do not change results; a comparison sets them."""

SET_HERE = PLACES - {"report"} | {"seed"}
"""Keys that a comparison sets itself."""


@dataclass(frozen=True)
class Variant:
    """A variant in a comparison: a method, given by name or `package.module:name`, with its own settings."""

    name: str
    method: str
    settings: Mapping[str, Value] = field(default_factory=dict)


def without_effect(
    variants: Sequence[Variant], chosen: Mapping[str, Any], completed: Mapping[str, Config]
) -> Iterator[str]:
    """Yield a sentence for each key that a user set and that has no effect for its variant or for all variants."""
    families = {config.family for config in completed.values()}
    remarks = {name: dict(config.remarks) for name, config in completed.items()}
    for variant in variants:
        yield from (f"{variant.name}: {why}" for key, why in remarks[variant.name].items() if key in variant.settings)
    for key, value in {} if is_complete(chosen) else chosen.items():
        if key in SET_HERE and value != default_of(fields_of(Config)[key]):
            yield f"{key} has no effect with a comparison, which sets it for its runs: leave it out"
        elsewhere = key.rpartition(".")[0] not in ("", *families) and keys_of_siblings(variants, {key: value})
        if all(key in each for each in remarks.values()) and not elsewhere:
            yield next(each[key] for each in remarks.values())


def keys_of_siblings(variants: Sequence[Variant], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Extend the keys that a user set for one method to the other compared methods with the same key.

    Methods share a key if their `Options` inherit it from the same class, such as `SizedOptions.widths`. A key
    that is set for several methods to different values is not extended. Returns only the additional keys.
    """
    families = {registry.method(variant.method).family for variant in variants}
    values: dict[str, list[Any]] = {}
    for key, value in chosen.items():
        prefix, _, name = key.rpartition(".")
        field = _field(prefix, name) if prefix else None
        for family in families:
            if field is not None and _field(family, name) is field and f"{family}.{name}" not in chosen:
                values.setdefault(f"{family}.{name}", []).append(value)
    return {key: first for key, (first, *more) in values.items() if all(each == first for each in more)}


def _field(family: str, name: str) -> Any:
    """Return the dataclass field of a method's own key, or None; methods that share a key share the field."""
    if family not in registry.methods():
        return None
    keys: Any = registry.method(family).Options
    return fields_of(keys).get(name)

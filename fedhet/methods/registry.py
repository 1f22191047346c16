"""Registry of federated methods, with their server and client classes.

A method (`fedhet.methods.method.Method`) is included in fedhet, provided by an installed package (entry point group
`fedhet.methods`), registered in this process (`register`), or imported from `package.module:name` or `FILE.py:NAME`.
"""

import importlib
import json
import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedhet.errors import ConfigError, nearest, shown
from fedhet.methods.method import Method, Traits
from fedhet.methods.options import KeyRow, rows_about

if TYPE_CHECKING:
    from fedhet.methods.options import Config

GROUP = "fedhet.methods"

DEFAULTS = {"server": "fedhet.server:FederatedStrategy", "client": "fedhet.client:ClientSide"}
"""The classes of a method that names none for its server or its clients."""

EXPECTED = "a strategy that fedhet.methods.method.method decorates, or an instance of Method"

_registered: dict[str, Method] = {}


@cache
def _declared() -> dict[str, dict[str, Any]]:
    """Return what .ci/generate.py found out about each included method: its strategy's `class`, and its `keys`."""
    return json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))


def own_methods() -> list[str]:
    """Return the sorted names of the methods that are included in fedhet."""
    return sorted(_declared())


def installed_methods() -> list[str]:
    """Return the sorted names of the methods in fedhet and other installed packages."""
    return sorted({*own_methods(), *_installed()})


def methods() -> list[str]:
    """Return the sorted names of all methods: in fedhet, in installed packages, and registered in this process."""
    return sorted({*installed_methods(), *_registered})


def register(method: Method | type[Any]) -> None:
    """Register or replace a method, or a strategy that declares one, in this process.

    Raises a ConfigError if fedhet or an installed package has a method of its name.
    """
    method = _declaration(method)
    if not isinstance(method, Method):
        raise ConfigError(f"register got {shown(method)}, which is no method: pass {EXPECTED}")
    if method.name in installed_methods():
        raise ConfigError(f"a method named {method.name!r} is installed already: give yours another name")
    _registered[method.name] = method


def name_of(value: Any) -> str:
    """Return the name of a method: `value` itself, or that of a `Method` or strategy class, which is registered."""
    method = _declaration(value)
    if isinstance(method, Method) and method.name not in methods():
        register(method)
    return method.name if isinstance(method, Method) else value


def registered() -> list[Method]:
    """Return the methods that `register` added in this process."""
    return list(_registered.values())


def method(reference: str, *, trusted: bool = True) -> Method:
    """Return the method with a name or reference; raise a ConfigError if there is none.

    A reference is `package.module:name` or `FILE.py:NAME`. If not `trusted`, its module must have been imported before.
    """
    if reference in _registered:
        return _registered[reference]
    if reference in _declared():
        return _own(reference)
    if reference in _installed():
        return _loaded(reference)
    if ":" in reference and (imported := _imported(reference) if trusted else _imported_before(reference)):
        register(imported)
        return imported
    raise ConfigError(
        f"{nearest('method', reference, methods())}; name your own method as package.module:name or FILE.py:NAME, "
        f"install it with an entry point of the group {GROUP}, or pass it to make_client_app and make_server_app"
    )


def check_known(reference: str, place: Path) -> None:
    """Check that the method `reference`, named in the file `place`, is known; raise a ConfigError otherwise."""
    if reference not in methods() and not _imported_before(reference):
        raise ConfigError(
            f"{place} names the method {reference!r}, which is not part of fedhet or of an installed package; its "
            "code is not imported without your consent: if you trust it, pass --method MODULE:NAME to fedhet run, "
            f"or call fedhet.methods.registry.method({reference!r}) in Python"
        )


def traits(config: "Config") -> Traits:
    """Return the traits of the configured method for the configured values of its keys."""
    return method(config.method_name, trusted=False).traits_of(config.options)


def strategy(name: str) -> type[Any]:
    """Return the server class of the method `name`, a subclass of `fedhet.server.FederatedStrategy`."""
    return _side(method(name), "server")


def client_side(name: str) -> type[Any]:
    """Return the client class of a known method, a subclass of `fedhet.client.ClientSide`."""
    return _side(method(name, trusted=False), "client")


def strategy_classes() -> dict[str, str]:
    """Return a dict from names of strategy classes to names of included methods, such as `{"FedHeNN": "fedhenn"}`."""
    return {declared["class"].rpartition(":")[2]: name for name, declared in _declared().items()}


def key_rows(reference: str) -> list[KeyRow]:
    """Return rows about the keys that only one method has; methods of fedhet are not imported for it."""
    if reference in _declared():
        return [(key, default, takes, help) for key, default, takes, help in _declared()[reference]["keys"]]
    declared = method(reference)
    return rows_about(declared.Options, f"{declared.family}.")


@cache
def _own(name: str) -> Method:
    return _method_at(_declared()[name]["class"], f"method {name!r}")


@cache
def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


@cache
def _loaded(name: str) -> Method:
    point = _installed()[name]
    method = _method_at(f"{point.module}:{point.attr}", f"method {name!r} of an installed package ({point.value})")
    if method.name != name:
        raise ConfigError(f"the entry point {name!r} is a method named {method.name!r}: give both the same name")
    return method


def _imported(reference: str) -> Method:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    return _method_at(reference, f"method = {reference!r}:")


def _imported_before(reference: str) -> Method | None:
    module, name = _place(reference)
    method = _declaration(vars(sys.modules[module]).get(name)) if module in sys.modules else None
    return method if isinstance(method, Method) and _registered.get(method.name) is method else None


def _method_at(reference: str, subject: str) -> Method:
    method = _declaration(_object(reference, subject))
    if not isinstance(method, Method):
        raise ConfigError(f"{subject} is {shown(method)}, which is no method: name {EXPECTED}")
    return method


def _declaration(value: Any) -> Any:
    """Return the method that a strategy declares, or `value` if it is no class or declares none itself."""
    return vars(value).get("method", value) if isinstance(value, type) else value


def _object(reference: str, subject: str) -> Any:
    module, name = _place(reference)
    if not module or not name:
        raise ConfigError(f"{subject} lacks a module or a name: write package.module:name or FILE.py:NAME")
    try:
        return getattr(module_of(module), name)
    except (ImportError, AttributeError, TypeError, ValueError, OSError, SyntaxError) as error:
        raise ConfigError(f"{subject} cannot be imported: {error}; correct its name or code") from error


def _place(reference: str) -> tuple[str, str]:
    module, _, name = reference.rpartition(":")
    return str(Path(module).resolve()) if module.endswith(".py") else module, name


def module_of(name: str) -> ModuleType:
    """Import and return a module, given its name or the absolute path of its file."""
    if not name.endswith(".py") or name in sys.modules:
        return importlib.import_module(name)
    spec = spec_from_file_location(name, name)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:  # a module that was imported in part must not stay
        del sys.modules[name]
        raise
    return module


def _side(method: Method, which: str) -> type[Any]:
    """Return a method's class for `which` (`server` or `client`)."""
    reference = getattr(method, which) or DEFAULTS[which]
    subject = f"the {which} side of method {method.name!r}, {reference!r},"
    side: type[Any] = _object(reference, subject)
    if getattr(side, "role", None) != which:
        raise ConfigError(f"{subject} must name a subclass of {DEFAULTS[which].replace(':', '.')}")
    return side

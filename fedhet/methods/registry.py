"""Look up methods by name.

A method (`fedhet.methods.method.Method`) is one of those in `fedhet/methods/included/`, one of an installed package
with an entry point of the group `fedhet.methods`, one that was registered in this process, or `package.module:name` or
`FILE.py:NAME`.
"""

import importlib
import pkgutil
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedhet.errors import ConfigError, nearest
from fedhet.methods.method import Drawing, Method, Traits
from fedhet.utils.text import log

if TYPE_CHECKING:
    from fedhet.methods.options import Config


GROUP = "fedhet.methods"

SIDES = {
    "server": ("fedhet.strategies", "fedhet.server:FederatedStrategy"),
    "client": ("fedhet.client_apps", "fedhet.client:ClientSide"),
}
"""For each side the package of the included methods' classes, and the default class."""

_registered: dict[str, Method] = {}


@cache
def own_methods() -> list[str]:
    """Return the names of the methods that are part of fedhet."""
    modules = pkgutil.iter_modules(importlib.import_module("fedhet.methods.included").__path__)
    return sorted(module.name.replace("_", "-") for module in modules if not module.name.startswith("_"))


def installed_methods() -> list[str]:
    """Return the names of the methods of fedhet and of other installed packages."""
    return sorted(_installed())


def methods() -> list[str]:
    """Return the names of all methods."""
    return sorted({*_installed(), *_registered})


def register(method: Method) -> None:
    """Make a method known in this process by its name; it replaces one that was registered by the same name.

    Raises:
        ConfigError: fedhet or an installed package has a method of this name.
    """
    if not isinstance(method, Method):
        raise ConfigError(f"a method is a fedhet.methods.method.Method, not a {type(method).__name__}")
    if method.name in _installed():
        raise ConfigError(f"there is a method {method.name!r} already: give yours another name")
    _registered[method.name] = method


def registered() -> list[Method]:
    """Return the methods that were registered in this process."""
    return list(_registered.values())


def method(reference: str, *, trusted: bool = True) -> Method:
    """Return a method.

    Args:
        reference: a name, `package.module:name` or `FILE.py:NAME`. The latter two are imported, also from the working
            folder, and registered.
        trusted: the reference may be imported.

    Raises:
        ConfigError: there is no such method.
    """
    if reference in _registered:
        return _registered[reference]
    if reference in _installed():
        return _loaded(reference)
    if ":" in reference and (imported := _imported(reference) if trusted else _imported_before(reference)):
        register(imported)
        return imported
    raise ConfigError(
        f"{nearest('method', reference, methods())}; a method of yours is package.module:name or FILE.py:NAME, an "
        f"entry point of the group {GROUP}, or passed to make_client_app and make_server_app"
    )


def of_data(reference: str, place: Path) -> Method:
    """Return the method that a file names without importing anything; raises a ConfigError if it is unknown here."""
    if reference in methods() or _imported_before(reference):
        return method(reference, trusted=False)
    raise ConfigError(
        f"{place} names the method {reference!r}, which is not part of fedhet or of an installed package, and code "
        "that the files of a run name is not imported: if you trust the method, name it yourself with "
        "--method MODULE:NAME (in Python, fedhet.registry.register)"
    )


def traits(config: "Config") -> Traits:
    """Return the traits of the configured method with the configured keys."""
    return method(config.method_name, trusted=False).traits_of(config.parameters)


def strategy(name: str) -> type[Any]:
    """Return a method's server side, a `fedhet.server.FederatedStrategy`."""
    found = method(name)
    side = _side(found, "server")
    default = not hasattr(side, "method") and found.family in own_methods()
    return _default_strategy(found.family) if default else side


def client_side(name: str) -> type[Any]:
    """Return a method's client side, a `fedhet.client.ClientSide`; no new method is imported."""
    return _side(method(name, trusted=False), "client")


@cache
def _default_strategy(name: str) -> type[Any]:
    """Return the default class under the name of an included method that has no file in `strategies/`."""
    side = _side(method(name), "server")
    names = {method: class_name for class_name, method in strategy_classes().items()}
    own = {"method": method(name), "__module__": side.__module__, "__doc__": f"The server side of {name}, the default."}
    return type(names[name], (side,), own)


@cache
def strategy_classes() -> dict[str, str]:
    """Return the included methods by the name of their classes.

    The files of either side define the name; a method without a file has its own name in capitals (`SecondLast`).
    """
    found: dict[str, str] = {}
    names = {name.replace("-", ""): name for name in own_methods()}
    for package, _ in SIDES.values():
        for folder in find_spec(package).submodule_search_locations:  # type: ignore[union-attr]
            for path in sorted(Path(folder).glob("[a-z]*.py")):
                classes = re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
                found |= {name: names[name.lower()] for name in classes if name.lower() in names}
    return found | {name.title().replace("-", ""): name for name in {*own_methods()} - {*found.values()}}


def drawings(name: str) -> Mapping[str, Drawing]:
    """Return the figures of a method's report by the name of their matrices; empty for an unknown method."""
    try:
        return method(name, trusted=False).drawings
    except ConfigError:
        return {}


@cache
def _installed() -> dict[str, EntryPoint]:
    """Return the entry points of the methods of fedhet and of other installed packages, by name."""
    included = {name: f"fedhet.methods.included.{name.replace('-', '_')}:method" for name in own_methods()}
    installed = {point.name: point for point in entry_points(group=GROUP)}
    for name in installed.keys() & included.keys():
        log.warning("method %r of the installed %s is ignored: fedhet has a method of its name", name, installed[name])
    return installed | {name: EntryPoint(name, value, GROUP) for name, value in included.items()}


@cache
def _loaded(name: str) -> Method:
    point = _installed()[name]
    method = _method_at(f"{point.module}:{point.attr}", f"method {name!r} of an installed package ({point.value})")
    if method.name != name:
        raise ConfigError(f"method {name!r} calls itself {method.name!r}: the names must be the same")
    return method


def _imported(reference: str) -> Method:
    """Import a method; the working folder is searched, too, as for a script."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    if not all(_place(reference)):
        raise ConfigError(f"method = {reference!r}: write package.module:name or FILE.py:NAME")
    return _method_at(reference, f"method = {reference!r}:")


def _imported_before(reference: str) -> Method | None:
    """Return the method of `package.module:name` or `FILE.py:NAME` if it is registered already."""
    module, name = _place(reference)
    method = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return method if isinstance(method, Method) and _registered.get(method.name) is method else None


def _method_at(reference: str, subject: str) -> Method:
    method = _object(reference, subject)
    if not isinstance(method, Method):
        raise ConfigError(f"{subject} is a {type(method).__name__}, not a fedhet.methods.method.Method")
    return method


def _object(reference: str, subject: str) -> Any:
    """Import the object `package.module:name` or `FILE.py:NAME`; the message of an error starts with `subject`."""
    module, name = _place(reference)
    try:
        return getattr(module_of(module), name)
    except (ImportError, AttributeError, TypeError, ValueError, OSError, SyntaxError) as error:
        raise ConfigError(f"{subject} cannot be imported: {error}") from error


def _place(reference: str) -> tuple[str, str]:
    """Return module and name; the module of a file is its absolute path, which is the same in all processes."""
    module, _, name = reference.rpartition(":")
    return str(Path(module).resolve()) if module.endswith(".py") else module, name


def module_of(name: str) -> ModuleType:
    """Import a module by its name or the absolute path of its file."""
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
    """Return a method's class for one side: the one that it names, or that of its name, or the default."""
    package, default = SIDES[which]
    if not (reference := getattr(method, which)):
        module = f"{package}.{method.family.replace('-', '_')}"
        if method.family not in own_methods() or find_spec(module) is None:
            reference = default
        else:
            reference = f"{module}:{_class_named(importlib.import_module(module), method.family)}"
    subject = f"the {which} side of method {method.name!r}, {reference!r},"
    side: type[Any] = _object(reference, subject)
    if getattr(side, "role", None) != which:
        raise ConfigError(f"{subject} is not a {default.replace(':', '.')}")
    return side


def _class_named(module: ModuleType, method: str) -> str:
    """Return the name of the class with the name of a method, such as FedHeNN for fedhenn."""
    classes = [name for name, each in vars(module).items() if isinstance(each, type)]
    return next(name for name in classes if name.lower() == method.replace("-", ""))

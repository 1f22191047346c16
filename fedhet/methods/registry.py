"""Look up methods by name.

A method (`fedhet.methods.method.Method`) is included in fedhet (`fedhet/methods/included/`), is provided by an
installed package (entry point group `fedhet.methods`), is registered in this process (`register`), or is imported from
`package.module:name` or `FILE.py:NAME`.
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
    """Return the names of all methods: of fedhet, of installed packages, and registered in this process."""
    return sorted({*_installed(), *_registered})


def register(method: Method) -> None:
    """Register a method under its name in this process, in place of any that was registered under the same name.

    Raises:
        ConfigError: fedhet or an installed package has a method of this name.
    """
    if not isinstance(method, Method):
        raise ConfigError(f"a method must be a fedhet.methods.method.Method, not a {type(method).__name__}")
    if method.name in _installed():
        raise ConfigError(f"a method named {method.name!r} is installed already: give yours another name")
    _registered[method.name] = method


def registered() -> list[Method]:
    """Return the methods that were registered in this process."""
    return list(_registered.values())


def method(reference: str, *, trusted: bool = True) -> Method:
    """Return the method of a name or reference.

    Args:
        reference: a name, `package.module:name` or `FILE.py:NAME`. The latter two are imported, also from the working
            folder, and registered.
        trusted: whether code that the reference names may be imported.

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
        f"{nearest('method', reference, methods())}; name your own method as package.module:name or FILE.py:NAME, "
        f"install it with an entry point of the group {GROUP}, or pass it to make_client_app and make_server_app"
    )


def of_data(reference: str, place: Path) -> Method:
    """Return the method that a run's file names, without importing new code; raises a ConfigError if it is unknown."""
    if reference in methods() or _imported_before(reference):
        return method(reference, trusted=False)
    raise ConfigError(
        f"{place} names the method {reference!r}, which is not part of fedhet or of an installed package, and code "
        "that the files of a run name is not imported: if you trust the method, name it yourself with "
        "--method MODULE:NAME (in Python, fedhet.registry.register)"
    )


def traits(config: "Config") -> Traits:
    """Return the traits of the configured method with the configured keys."""
    return method(config.method_name, trusted=False).traits_of(config.options)


def strategy(name: str) -> type[Any]:
    """Return a method's server side, a `fedhet.server.FederatedStrategy`."""
    found = method(name)
    side = _side(found, "server")
    default = not hasattr(side, "method") and found.family in own_methods()
    return _default_strategy(found.family) if default else side


def client_side(name: str) -> type[Any]:
    """Return a method's client side, a `fedhet.client.ClientSide`; references to unknown code are not imported."""
    return _side(method(name, trusted=False), "client")


@cache
def _default_strategy(name: str) -> type[Any]:
    """Return a subclass of the default strategy, named after an included method that has no file in `strategies/`."""
    side = _side(method(name), "server")
    names = {method: class_name for class_name, method in strategy_classes().items()}
    own = {"method": method(name), "__module__": side.__module__, "__doc__": f"The server side of {name}, the default."}
    return type(names[name], (side,), own)


@cache
def strategy_classes() -> dict[str, str]:
    """Map the class name of each included method to the method's name, such as `FedHeNN` to `fedhenn`.

    A class in `strategies/` or `client_apps/` determines the class name. For a method without such a file, it is the
    method's name in title case without hyphens (`SecondLast`).
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
        raise ConfigError(f"the entry point {name!r} is a method named {method.name!r}: give both the same name")
    return method


def _imported(reference: str) -> Method:
    """Import the method of `package.module:name` or `FILE.py:NAME`; the working folder is searched as for a script."""
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
    """Split a reference into module and name; for a file, the module is its absolute path."""
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
    """Return a method's class for `server` or `client`: the declared one, the one with its name, or the default."""
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
        raise ConfigError(f"{subject} must be a subclass of {default.replace(':', '.')}")
    return side


def _class_named(module: ModuleType, method: str) -> str:
    """Return the name of a module's class that equals a method's name except for case and hyphens, such as FedHeNN."""
    classes = [name for name, each in vars(module).items() if isinstance(each, type)]
    return next(name for name in classes if name.lower() == method.replace("-", ""))

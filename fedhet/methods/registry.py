"""Methods by name, and what stands behind a name.

A method is a `Method`: one of ours, a module of `fedhet/methods/included/`; one of an installed package, by an
entry point of the group `fedhet.methods`; one that was given in this process; or `package.module:name`, or
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

_given: dict[str, Method] = {}


@cache
def own_methods() -> list[str]:
    """Names of the methods that come with fedhet."""
    modules = pkgutil.iter_modules(importlib.import_module("fedhet.methods.included").__path__)
    return sorted(module.name.replace("_", "-") for module in modules if not module.name.startswith("_"))


def installed_methods() -> list[str]:
    """Names of the methods that come with fedhet or with another installed package."""
    return sorted(_installed())


def methods() -> list[str]:
    """Names of all methods."""
    return sorted({*_installed(), *_given})


def models() -> list[str]:
    """Names of all architectures that come with fedhet."""
    from fedhet import models

    return models.names()


def datasets() -> list[str]:
    """Names of all data sets."""
    from fedhet import data

    return data.names()


def partitions() -> list[str]:
    """Names of all ways to deal examples to clients."""
    from fedhet import data

    return data.partitions()


def give(method: Method) -> None:
    """Make a method known in this process, by its own name; one that was given before by that name is forgotten.

    A ConfigError if one of fedhet's or of an installed package goes by that name.
    """
    if not isinstance(method, Method):
        raise ConfigError(f"a method is a fedhet.methods.method.Method, not a {type(method).__name__}")
    if method.name in _installed():
        raise ConfigError(f"there is a method {method.name!r} already: give yours another name")
    _given[method.name] = method


def given() -> list[Method]:
    """The methods that were made known in this process."""
    return list(_given.values())


def method(reference: str, *, trusted: bool = True) -> Method:
    """Return the method of a name.

    Args:
        reference: a name, `package.module:name` or `FILE.py:NAME`. The latter two are imported (also from the working
            folder) and known by the method's own name afterwards.
        trusted: whether the reference may be imported.

    Raises:
        ConfigError: there is no such method, or the object is no method.
    """
    if reference in _given:
        return _given[reference]
    if reference in _installed():
        return _loaded(reference)
    if ":" in reference and (imported := _imported(reference) if trusted else _imported_before(reference)):
        give(imported)
        return imported
    raise ConfigError(
        f"{nearest('method', reference, methods())}; a method of yours is package.module:name or FILE.py:NAME, an "
        f"entry point of the group {GROUP}, or given to make_client_app and make_server_app"
    )


def of_data(reference: str, place: Path) -> Method:
    """The method that a file of data names, which may be anybody's: nothing new is imported.

    One that is not known here is a ConfigError, which says how the user makes it known.
    """
    if reference in methods() or _imported_before(reference):
        return method(reference, trusted=False)
    raise ConfigError(
        f"{place} names the method {reference!r}, which is none of fedhet's or of an installed package; the folder "
        "of a run is data, and nothing is imported because it says so: if you trust the method, name it too, with "
        "--method MODULE:NAME (in Python, fedhet.methods.registry.give)"
    )


def traits(config: "Config") -> Traits:
    """The traits of the configured method with the configured parameters."""
    return method(config.method_name, trusted=False).traits_of(config.parameters)


def strategy(name: str) -> type[Any]:
    """A method's `fedhet.server.FederatedStrategy`; a ConfigError without such a method, or if it names none."""
    return _side(method(name), "server")


@cache
def strategy_classes() -> dict[str, str]:
    """Return the included methods by the name of their strategy's class, as the files in `strategies/` define it."""
    found: dict[str, str] = {}
    methods = {name.replace("-", ""): name for name in own_methods()}
    for folder in find_spec("fedhet.strategies").submodule_search_locations:  # type: ignore[union-attr]
        for path in sorted(Path(folder).glob("[a-z]*.py")):
            classes = re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
            found |= {name: methods[name.lower()] for name in classes if name.lower() in methods}
    return found


def client_side(name: str) -> type[Any]:
    """A method's `fedhet.client.ClientSide`, as `strategy`; nothing is imported because the wire names it."""
    return _side(method(name, trusted=False), "client")


def drawings(name: str) -> Mapping[str, Drawing]:
    """Pictures of a method's report by the name of their matrices; none of a method that is not known here."""
    try:
        return method(name, trusted=False).drawings
    except ConfigError:
        return {}


@cache
def _installed() -> dict[str, EntryPoint]:
    """Return entry points of the methods of fedhet and of other installed packages, by name."""
    included = {name: f"fedhet.methods.included.{name.replace('-', '_')}:method" for name in own_methods()}
    installed = {point.name: point for point in entry_points(group=GROUP)}
    for name in installed.keys() & included.keys():
        log.warning("method %r, installed as %s, goes by the name of one of fedhet's", name, installed[name].value)
    return installed | {name: EntryPoint(name, value, GROUP) for name, value in included.items()}


@cache
def _loaded(name: str) -> Method:
    point = _installed()[name]
    method = _method_at(f"{point.module}:{point.attr}", f"method {name!r} of an installed package ({point.value})")
    if method.name != name:
        raise ConfigError(f"method {name!r} calls itself {method.name!r}: the names must be the same")
    return method


def _imported(reference: str) -> Method:
    """Import a method; the working folder is searched too, as for a script."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    if not all(_place(reference)):
        raise ConfigError(f"method = {reference!r}: write package.module:name or FILE.py:NAME")
    return _method_at(reference, f"method = {reference!r}:")


def _imported_before(reference: str) -> Method | None:
    """Return the method of `package.module:name` or `FILE.py:NAME` if it is imported and registered already."""
    module, name = _place(reference)
    method = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return method if isinstance(method, Method) and _given.get(method.name) is method else None


def _method_at(reference: str, subject: str) -> Method:
    method = _object(reference, subject)
    if not isinstance(method, Method):
        raise ConfigError(f"{subject} is a {type(method).__name__}, no fedhet.methods.method.Method")
    return method


def _object(reference: str, subject: str) -> Any:
    """Import the object `package.module:name` or `FILE.py:NAME`; an error calls it `subject`."""
    module, name = _place(reference)
    try:
        return getattr(module_of(module), name)
    except (ImportError, AttributeError, TypeError, ValueError, OSError, SyntaxError) as error:
        raise ConfigError(f"{subject} cannot be imported: {error}") from error


def _place(reference: str) -> tuple[str, str]:
    """Return module and name; the module of a file is its absolute path, the same in all processes."""
    module, _, name = reference.rpartition(":")
    return str(Path(module).resolve()) if module.endswith(".py") else module, name


def module_of(name: str) -> ModuleType:
    """Import a module by its name or the absolute path of a file; raises like Python's import."""
    if not name.endswith(".py") or name in sys.modules:
        return importlib.import_module(name)
    spec = spec_from_file_location(name, name)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:  # whatever the file raised: half a module must not stay
        del sys.modules[name]
        raise
    return module


SIDES = {
    "server": ("fedhet.strategies", "fedhet.server:FederatedStrategy"),
    "client": ("fedhet.client_apps", "fedhet.client:ClientSide"),
}
"""For each side the package of the included methods' classes, and the default class."""


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
        raise ConfigError(f"{subject} is no {default.replace(':', '.')}")
    return side


def _class_named(module: ModuleType, method: str) -> str:
    """Return the name of the class that is called like a method, such as FedHeNN for fedhenn."""
    classes = [name for name, each in vars(module).items() if isinstance(each, type)]
    return next(name for name in classes if name.lower() == method.replace("-", ""))

"""Methods by name, and what stands behind a name.

A method is a `fedhet.method.Method`: one of ours, a module of `fedhet/methods/`; one of an installed package, by an
entry point of the group `fedhet.methods`; one that was given in this process; or `package.module:name`, or
`FILE.py:NAME`.
"""

import importlib
import logging
import pkgutil
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedhet.errors import ConfigError, nearest
from fedhet.method import Drawing, Method, Traits

if TYPE_CHECKING:
    from fedhet.options import Config

_log = logging.getLogger("flwr").getChild("fedhet")

GROUP = "fedhet.methods"

_given: dict[str, Method] = {}


@cache
def own_methods() -> list[str]:
    """Names of the methods that come with fedhet."""
    modules = pkgutil.iter_modules(importlib.import_module("fedhet.methods").__path__)
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
        raise ConfigError(f"a method is a fedhet.method.Method, not a {type(method).__name__}")
    if method.name in _installed():
        raise ConfigError(f"there is a method {method.name!r} already: give yours another name")
    _given[method.name] = method


def given() -> list[Method]:
    """The methods that were made known in this process."""
    return list(_given.values())


def method(reference: str, *, trusted: bool = True) -> Method:
    """The method that goes by a name.

    Args:
        reference: a name; or `package.module:name` or `FILE.py:NAME`, which is imported (from the working folder too)
            and is known by its own name from then on.
        trusted: whether the reference may be imported.

    Raises:
        ConfigError: there is no such method, or it is none.
    """
    if reference in _given:
        return _given[reference]
    if reference in _installed():
        return _loaded(reference)
    if ":" in reference and (found := _imported(reference) if trusted else _imported_before(reference)):
        give(found)
        return found
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
        "--method MODULE:NAME (in Python, fedhet.registry.give)"
    )


def traits(config: "Config") -> Traits:
    """The traits of the configured method with the configured parameters."""
    return method(config.method_name, trusted=False).traits_of(config.parameters)


def strategy(name: str) -> type[Any]:
    """A method's `fedhet.server.FederatedStrategy`; a ConfigError without such a method, or if it names none."""
    return _side(method(name), "server")


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
    """Where the methods of fedhet and of other installed packages are, by name."""
    own = {name: f"fedhet.methods.{name.replace('-', '_')}:method" for name in own_methods()}
    found = {point.name: point for point in entry_points(group=GROUP)}
    for name in found.keys() & own.keys():
        _log.warning("method %r, installed as %s, goes by the name of one of fedhet's", name, found[name].value)
    return found | {name: EntryPoint(name, value, GROUP) for name, value in own.items()}


@cache
def _loaded(name: str) -> Method:
    point = _installed()[name]
    found = _method_at(f"{point.module}:{point.attr}", f"method {name!r} of an installed package ({point.value})")
    if found.name != name:
        raise ConfigError(f"method {name!r} calls itself {found.name!r}: the names must be the same")
    return found


def _imported(reference: str) -> Method:
    """A method by where it is written; the working folder counts, as it does for a script that lies there."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    if not all(_place(reference)):
        raise ConfigError(f"method = {reference!r}: write package.module:name or FILE.py:NAME")
    return _method_at(reference, f"method = {reference!r}:")


def _imported_before(reference: str) -> Method | None:
    """The method of `package.module:name` or `FILE.py:NAME`, where it is imported and given already."""
    module, name = _place(reference)
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return found if isinstance(found, Method) and _given.get(found.name) is found else None


def _method_at(reference: str, what: str) -> Method:
    found = _object(reference, what)
    if not isinstance(found, Method):
        raise ConfigError(f"{what} is a {type(found).__name__}, no fedhet.method.Method")
    return found


def _object(reference: str, what: str) -> Any:
    """The object that `package.module:name` or `FILE.py:NAME` names; `what` it is says the error."""
    module, name = _place(reference)
    try:
        return getattr(module_of(module), name)
    except (ImportError, AttributeError, ValueError, OSError, SyntaxError) as error:
        raise ConfigError(f"{what} cannot be imported: {error}") from error


def _place(reference: str) -> tuple[str, str]:
    """The module and the name in it; a file is a module by its whole path, so that all processes know it by one."""
    module, _, name = reference.rpartition(":")
    return str(Path(module).resolve()) if module.endswith(".py") else module, name


def module_of(name: str) -> ModuleType:
    """The module of a name or of the whole path of a file, imported if it is not yet; raises as Python's import."""
    if not name.endswith(".py") or name in sys.modules:
        return importlib.import_module(name)
    spec = spec_from_file_location(name, name)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _side(method: Method, which: str) -> type[Any]:
    reference = getattr(method, which)
    what = f"the {which} side of method {method.name!r}, {reference!r},"
    side: type[Any] = _object(reference, what)
    if getattr(side, "role", None) != which:
        kinds = {"server": "fedhet.server.FederatedStrategy", "client": "fedhet.client.ClientSide"}
        raise ConfigError(f"{what} is no {kinds[which]}")
    return side

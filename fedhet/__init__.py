"""Federated learning among clients whose neural networks differ, as a Flower app."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet.utils.version import __version__

if TYPE_CHECKING:
    from fedhet.client.app import make_client_app
    from fedhet.client.own_app import wrap
    from fedhet.comparing import compare
    from fedhet.comparing.recommending import recommend
    from fedhet.engines.running import run
    from fedhet.results.run_result import RunResult
    from fedhet.server.app import make_server_app
    from fedhet.tasks import Task


# In a checkout (and in a Flower app bundle) `strategies/` and `client_apps/` lie beside this folder; a wheel has
# them inside it. Either way their modules have one name: `fedhet.strategies.X`, `fedhet.client_apps.X`.
_BESIDE = Path(__file__).resolve().parent.parent
if (_BESIDE / "strategies").is_dir() and (_BESIDE / "client_apps").is_dir():
    __path__.append(str(_BESIDE))

_LAZY = {
    "make_client_app": "fedhet.client.app",
    "make_server_app": "fedhet.server.app",
    "compare": "fedhet.comparing",
    "recommend": "fedhet.comparing.recommending",
    "run": "fedhet.engines.running",
    "RunResult": "fedhet.results.run_result",
    "Task": "fedhet.tasks",
    "wrap": "fedhet.client.own_app",
}

__all__ = [
    "RunResult",
    "Task",
    "__version__",
    "compare",
    "make_client_app",
    "make_server_app",
    "recommend",
    "run",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Import late: torch and Flower take seconds. Strategies (`FedHeNN`, `FedAvg`, ...) are found by class name."""
    from importlib import import_module

    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name[:1].isupper() and name in (strategies := _strategies()):
        return import_module("fedhet.methods.registry").strategy(strategies[name])
    raise AttributeError(f"module 'fedhet' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, the methods' strategies among them."""
    return sorted([*__all__, *_strategies()])


def _strategies() -> dict[str, str]:
    """Return included methods by the name of their strategy's class."""
    from fedhet.methods import registry

    return registry.strategy_classes()

"""Federated learning among clients whose neural networks differ, as a Flower app. Types are in `__init__.pyi`."""

import logging
from typing import Any

from fedhet.utils.text import __version__

_LAZY = {
    "by_column": "fedhet.data.pooled",
    "guard": "fedhet.client.guard",
    "load_model": "fedhet.client.state",
    "make_client_app": "fedhet.client.app",
    "make_server_app": "fedhet.server.app",
    "compare": "fedhet.comparing",
    "evaluate": "fedhet.engines.evaluating",
    "recommend": "fedhet.comparing.recommending",
    "run": "fedhet.engines.running",
    "RunResult": "fedhet.engines.running",
    "Task": "fedhet.tasks",
    "wrap": "fedhet.client.own_app",
}

__all__ = [*_LAZY, "__version__"]


def __getattr__(name: str) -> Any:
    """Return a public function or strategy class, imported at its first use (torch and Flower take seconds)."""
    logger = logging.getLogger("flwr")
    level = logger.level
    try:
        return _imported(name)
    finally:
        # The import of Flower replaces a level that the user set.
        logger.setLevel(level or logger.level)


def _imported(name: str) -> Any:
    from importlib import import_module

    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name[:1].isupper():
        registry = import_module("fedhet.methods.registry")
        if name in (strategies := registry.strategy_classes()):
            return registry.strategy(strategies[name])
    raise AttributeError(f"module 'fedhet' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, including the strategies."""
    from fedhet.methods import registry

    return sorted([*__all__, *registry.strategy_classes()])

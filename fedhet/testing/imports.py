"""Which modules an import brings with it, found out in a process of its own, by this file as a program."""

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedhet.method import Method

SHARED = (
    *("torch", "torch_geometric.nn", "flwr.app", "flwr.clientapp", "flwr.serverapp"),
    *("fedhet.config", "fedhet.learning", "fedhet.wire"),
)
"""Imported once, before the process forks for each module: what is heavy, and what both halves may have."""


def brought(side: str, method: "Method") -> list[str]:
    """The modules that are there once a method's `server` or `client` half was imported in a fresh process."""
    from fedhet import registry

    ours = [registry.method(name) for name in registry.own_methods()]
    together = ours if method in ours else [method]
    halves = {module_of(each, half) for each in together for half in ("server", "client")}
    return _brought_by(tuple(sorted(halves)))[module_of(method, side)]


def module_of(method: "Method", side: str) -> str:
    """The module of a method's `server` or `client` half."""
    reference: str = getattr(method, side)
    return reference.partition(":")[0]


@cache
def _brought_by(modules: tuple[str, ...]) -> dict[str, list[str]]:
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-P", __file__, *modules]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise ImportError(f"one of {', '.join(modules)} cannot be imported:\n{done.stderr}")
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _brought(module: str) -> list[str]:
    importlib.import_module(module)
    return sorted(sys.modules)


if __name__ == "__main__":
    for shared in SHARED:
        importlib.import_module(shared)
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps(dict(zip(sys.argv[1:], pool.map(_brought, sys.argv[1:], chunksize=1), strict=True))))

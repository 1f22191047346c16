"""Which modules an import brings with it, found out in a process of its own, by this file as a program.

The program imports what all may have, once, then forks for each module that it is asked for, until its input ends.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedhet.method import Method

SHARED = (
    *("torch", "torch_geometric.nn", "flwr.app", "flwr.clientapp", "flwr.serverapp"),
    *("fedhet.config", "fedhet.learning", "fedhet.wire"),
)
"""Imported once, before the process forks for each module: what is heavy, and what both sides may have."""


def module_of(method: "Method", side: str) -> str:
    """The module of a method's `server` or `client` side."""
    reference: str = getattr(method, side)
    return reference.partition(":")[0]


@cache
def _program() -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", __file__]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@cache
def brought(module: str) -> list[str]:
    """The modules that are there once a module was imported in a fresh process."""
    program = _program()
    assert program.stdin is not None
    assert program.stdout is not None
    print(json.dumps([sys.path, module]), file=program.stdin, flush=True)
    found: list[str] | str = json.loads(program.stdout.readline())
    if isinstance(found, str):
        raise ImportError(f"{module} cannot be imported:\n{found}")
    return found


def _brought(path: list[str], module: str) -> list[str] | str:
    sys.path[:] = path
    try:
        with contextlib.redirect_stdout(sys.stderr):
            importlib.import_module(module)
    except Exception:  # whatever a module raises, its test tells
        return traceback.format_exc()
    return sorted(sys.modules)


if __name__ == "__main__":
    for shared in SHARED:
        importlib.import_module(shared)
    for line in sys.stdin:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            print(json.dumps(pool.apply(_brought, json.loads(line))), flush=True)

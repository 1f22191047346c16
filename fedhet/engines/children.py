"""Processes of one's own: forked from one that has imported what runs need, one thread each."""

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

# Read by the numerical libraries when they are first loaded, so they must be set before a process starts. Two processes
# with two threads each on two cores were measured to be a hundred times slower than with one.
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_PRELOADED = ("fedhet.running", "fedhet.client.app", "fedhet.server", "fedhet.engines.local")


def prepare(*further: str) -> None:
    """Have the process that others are forked from import what they need, while this one goes on; at most once.

    Args:
        further: modules that they need beside those that workers need; of use where that process is not there yet.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([*_PRELOADED, *further])
    with _one_thread():
        ensure_running()
    atexit.register(_end)


def _end() -> None:
    """End the process that others are forked from, which would go on importing, and then wait, without its parent."""
    atexit.unregister(_end)
    if (server := _forkserver._forkserver_pid) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
        _forkserver._stop()


def start(
    function: Callable[..., None], *arguments: Any, name: str, duplex: bool = False
) -> tuple[BaseProcess, Connection]:
    """Call `function(connection, *arguments)` in a process that ends with this one; waits for what was prepared.

    It does not import the script that this process runs, which may start runs itself.

    Args:
        function: importable by name.
        arguments: picklable.
        name: of the process.
        duplex: whether it is written to as well; else it only writes.

    Returns:
        The process, and the connection to it.
    """
    prepare()
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex)
    process = context.Process(target=_run, args=(function, there, *arguments), name=name, daemon=True)
    with _without_main():
        process.start()
    there.close()
    return process, here


def _run(function: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    function(*arguments)


def _end_with_parent() -> None:
    """A parent that was killed ends nobody itself."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _THREAD_LIMITS}
    os.environ.update(dict.fromkeys(_THREAD_LIMITS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _without_main() -> Iterator[None]:
    main: Any = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main

"""Processes of one's own: forked from one that has imported what runs need, one thread each.

That one is `multiprocessing`'s; what of its insides is relied on, so that it ends with this process, is here alone.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.forkserver import _forkserver
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Any

# Read by the numerical libraries when they are first loaded, so they must be set before a process starts. Two processes
# with two threads each on two cores were measured to be a hundred times slower than with one.
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

HIGH = 900
"""The least descriptor of the socket in a process of one's own."""

_server: Any = _forkserver
_PRELOADED = ("fedhet.running", "fedhet.client.app", "fedhet.server", "fedhet.engines.local")


def prepare(*further: str) -> None:
    """Have the process that others are forked from import what they need, while this one goes on; at most once.

    Args:
        further: modules that they need beside those that workers need; of use where that process is not there yet.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([*_PRELOADED, *further])
    with _one_thread(), _without_interrupts():
        _server.ensure_running()
    _ended_at_exit()


@cache
def _ended_at_exit() -> None:
    """As this process ends, so does the one that others are forked from: it might still be importing, for seconds.

    It comes after the processes that were forked and before the folder of its socket is removed (-100).
    """
    Finalize(None, _end, exitpriority=-1)


def _end() -> None:
    if (process := _server._forkserver_pid) is not None:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        _server._stop()


def start(function: Callable[..., None], *arguments: Any, name: str) -> tuple[BaseProcess, Connection]:
    """Call `function(connection, *arguments)` in a process that ends with this one; waits for what was prepared.

    It does not import the script that this process runs, which may start runs itself.

    Args:
        function: importable by name.
        arguments: picklable.
        name: of the process.

    Returns:
        The process, and the connection to it, a socket for parcels (`fedhet.engines.parcels`).
    """
    prepare()
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=True)
    process = context.Process(target=_run, args=(function, there, *arguments), name=name, daemon=True)
    with _without_main():
        process.start()
    there.close()
    return process, here


def _run(function: Callable[..., None], connection: Connection, *arguments: Any) -> None:
    _let_go()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    function(_out_of_the_way(connection), *arguments)


def _out_of_the_way(connection: Connection) -> Connection:
    """The same connection by a descriptor that nothing else in this process comes upon by accident."""
    with suppress(ImportError, OSError):  # no such call on Windows; so many descriptors are not allowed
        import fcntl

        moved = Connection(fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH))
        connection.close()
        return moved
    return connection


def _let_go() -> None:
    """Close what ties this process to the one that it was forked from, or what is written there would end that one."""
    for owner, name in ((_server, "_forkserver_alive_fd"), (resource_tracker._resource_tracker, "_fd")):
        os.close(getattr(owner, name))
        setattr(owner, name, None)


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
def _without_interrupts() -> Iterator[None]:
    """What is started within ignores Ctrl-C from its first moment on: this process ends the others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _without_main() -> Iterator[None]:
    main: Any = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main

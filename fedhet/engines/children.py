"""Child processes with one thread each, forked from `multiprocessing`'s fork server, which has imported fedhet.

Where there is no fork server (Windows), each process imports fedhet itself. Pools of `loky` and `concurrent.futures`
are not used, since all their calls fail after one of their processes is killed.
"""

import contextlib
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize, get_temp_dir
from types import ModuleType
from typing import Any

import cloudpickle

from fedhet.errors import FedhetError
from fedhet.utils.machine import open_streams

# Numerical libraries read these when they are loaded. On two cores, two processes with two threads each were a hundred
# times slower than with one thread each.
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

RUN = "fedhet run"  # name of a child process that executes one of several runs

_PRELOADED = ("fedhet.engines.running", "fedhet.client.app", "fedhet.server")


class ChildError(FedhetError):
    """An error of a child process, which has ended unexpectedly or exceeded a timeout."""


class Child:
    """A child process that calls `function(connection, *arguments)`, and is killed when its parent ends.

    `connection` is a pipe to the parent, and `name` the name of the process. Unlike a process of `multiprocessing`, it
    does not import the parent's script, which may start runs itself.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any, name: str) -> None:
        context: Any = prepare()
        self.connection, there = context.Pipe(duplex=True)
        self.process = context.Process(target=_run, args=(function, there, *arguments), name=name, daemon=True)
        with _starting():
            self.process.start()
        there.close()

    def send(self, content: object) -> None:
        """Pickle an object and send it to the process; if that has ended, the next `receive` raises a ChildError."""
        with contextlib.suppress(ConnectionError):
            send(self.connection, content)

    def receive(self) -> Any:
        """Return the process's next object; kill it and raise a ChildError if it ends."""
        try:
            return receive(self.connection)
        except Exception as error:  # whatever it was, nothing more can be read from the process
            self.process.join(1.0)
            self.end()
            ended = f"the process {self.process.name!r} ended with exit code {self.process.exitcode}"
            reason = "(-9: killed, often for lack of memory); its messages on the terminal or in a log file may say why"
            raise ChildError(f"{ended} {reason}") from error

    def end(self) -> None:
        """Kill the process and close the connection to it."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def prepare(*modules: str) -> BaseContext:
    """Return a `multiprocessing` context whose fork server, if available, has imported fedhet and the named modules."""
    open_streams()
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *modules])
    with _starting():
        _server().ensure_running()
    return context


@cache
def _server() -> Any:
    """Return the `ForkServer` object of `multiprocessing`, and let the server's process end with this process."""
    from multiprocessing.forkserver import _forkserver

    server: Any = _forkserver
    if len(before := tempfile.gettempdir()) > 70:  # systems allow paths of about 104 characters for a socket
        tempfile.tempdir = "/tmp"  # `get_temp_dir` makes a private folder in it
        get_temp_dir()
        tempfile.tempdir = before

    def end() -> None:
        if server._forkserver_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()

    Finalize(None, end, exitpriority=-1)  # after the children, and before the folder of its socket is removed (-100)
    return server


def _run(function: Callable[..., None], connection: Connection, *arguments: Any) -> None:
    parent: Any = multiprocessing.parent_process()

    def end_with_parent() -> None:  # even if it is killed
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    multiprocessing.current_process().daemon = False  # a user's DataLoader may start processes
    function(connection, *arguments)


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Context manager in which new processes get one thread, ignore Ctrl-C, and do not import this process's script.

    A Ctrl-C meanwhile interrupts this process afterwards.
    """
    main = sys.modules["__main__"]
    before = {name: os.environ.get(name) for name in _THREAD_LIMITS}
    in_main_thread = threading.current_thread() is threading.main_thread()
    interrupts = list[int]()
    if sys.platform != "win32":
        resource_tracker.ensure_running()  # its start unblocks the signal
    if in_main_thread:
        handler = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
        if sys.platform != "win32":
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # new processes inherit it
    sys.modules["__main__"] = ModuleType("__main__")
    os.environ.update(dict.fromkeys(_THREAD_LIMITS, "1"))
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
        if in_main_thread:
            if sys.platform != "win32":
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            signal.signal(signal.SIGINT, handler)
            if interrupts:
                signal.raise_signal(signal.SIGINT)


def send(connection: Connection, content: object) -> None:
    """Pickle an object with cloudpickle and send it; the caller must receive a reply before it sends another one."""
    # Pickled into the socket, without copies of large arrays: a tenth of the time of `send_bytes`.
    with io.BytesIO() if sys.platform == "win32" else open(connection.fileno(), "wb", closefd=False) as stream:
        Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(content)
        if isinstance(stream, io.BytesIO):
            connection.send_bytes(stream.getvalue())


def receive(connection: Connection) -> Any:
    """Receive and unpickle an object; raises an exception, such as EOFError, if the sender has ended."""
    if sys.platform == "win32":
        return pickle.loads(connection.recv_bytes())  # noqa: S301 - a child's
    with open(connection.fileno(), "rb", closefd=False) as stream:
        return pickle.load(stream)  # noqa: S301 - a child's


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return lru_cache(**parameters)(function)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that copies cached functions of the user's script, since a child process does not import the script."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle `obj` (see `pickle`); functions with `functools.cache` lose their cached results."""
        if type(obj) is type(_server) and obj.__module__ == "__main__":
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)

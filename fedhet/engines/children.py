"""Child processes with one thread each, forked from `multiprocessing`'s fork server, which has imported fedhet.

Without a fork server (on Windows), each process is started from scratch and imports fedhet itself.

Pools of `loky` and `concurrent.futures` are not used, since they fail every call after one of their processes is
killed. This is the only module that uses private parts of `multiprocessing`, to end the fork server with this process.
"""

import contextlib
import io
import mmap
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize, get_temp_dir
from types import ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from fedhet.errors import FedhetError
from fedhet.flower import Array

# Numerical libraries read these when they are loaded. On two cores, two processes with two threads each were a hundred
# times slower than with one thread each.
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

FAREWELL = 1.0
"""Seconds for a child to end after it has closed its connection."""

RUN = "fedhet run"
"""Name of a process that carries out one of several runs."""

LONGEST_FOLDER = 70
"""Length of a temporary folder's path up to which a socket fits in; systems allow paths of about 104 characters."""

_starting = threading.Lock()  # several threads start processes, which changes the environment for a moment
_PRELOADED = ("fedhet.engines.running", "fedhet.client.app", "fedhet.server")


class ChildError(FedhetError):
    """Raised if a child process ended or exceeded a timeout; the message has its exit code or the timeout."""


class Child:
    """A child process that calls `function(connection, *arguments)`, and ends with its parent.

    Unlike `multiprocessing`, it does not import the parent's script, which may start runs itself.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any, name: str) -> None:
        with _starting:
            context: Any = prepare()
            self.connection, there = context.Pipe(duplex=True)
            self.process = context.Process(target=_run, args=(function, there, *arguments), name=name, daemon=True)
            with _without_main(), _one_thread(), _without_interrupts():
                self.process.start()
            there.close()

    def send(self, content: object) -> None:
        """Send a message to the process; if the process has ended, the next `receive` raises a ChildError."""
        with contextlib.suppress(ConnectionError):
            send(self.connection, content)

    def receive(self, timeout: float | None = None) -> Any:
        """Return the next message; raises a ChildError if the process ends or exceeds the timeout, which kills it."""
        if timeout is not None and not self.connection.poll(timeout):
            self.end()
            raise ChildError(f"no reply within {timeout:g} s: increase timeout")
        try:
            return receive(self.connection)
        except Exception as error:  # whatever it was, nothing more can be read from the process
            self.process.join(FAREWELL)
            self.end()
            raise ChildError(f"its process ended with exit code {self.process.exitcode}") from error

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def prepare(*modules: str) -> BaseContext:
    """Return a `multiprocessing` context, whose fork server (if available) imports workers' modules and `modules`."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *modules])
    _in_short_folder()
    with _one_thread(), _without_interrupts():
        _server().ensure_running()
    _ended_at_exit()
    return context


def _server() -> Any:
    from multiprocessing.forkserver import _forkserver

    return _forkserver


@cache
def _in_short_folder() -> None:
    """Put the fork server's socket into /tmp if the path of the temporary folder (TMPDIR) is too long for a socket."""
    before = tempfile.gettempdir()
    if len(before) > LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"  # `get_temp_dir` makes a private folder in it
        get_temp_dir()
        tempfile.tempdir = before


@cache
def _ended_at_exit() -> None:
    # After the children, and before the folder of its socket is removed (-100).
    Finalize(None, _end_server, exitpriority=-1)


def _end_server() -> None:
    server = _server()
    if (process := server._forkserver_pid) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        server._stop()


def _run(function: Callable[..., None], connection: Connection, *arguments: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    multiprocessing.current_process().daemon = False  # a user's DataLoader may start processes
    function(connection, *arguments)


def _end_with_parent() -> None:
    """Wait until the parent process has ended, even if it is killed, and exit."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = {name: os.environ.pop(name, None) for name in _THREAD_LIMITS}
    os.environ.update(dict.fromkeys(_THREAD_LIMITS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Context in which processes are started that ignore Ctrl-C, since their parent ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    main: Any = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


LARGE = 1 << 17
"""Size in bytes from which a buffer is shared."""

SHARES = hasattr(os, "memfd_create")
"""Whether this system has files in memory."""

_ALIGNED = 64


class SharedMessage:
    """An object that is pickled once, by cloudpickle, and sent several times; large arrays are in shared memory."""

    def __init__(self, content: object) -> None:
        pickled = io.BytesIO()
        self._memory: io.BufferedRandom | None = None
        self._places: list[tuple[int, int]] = []
        try:
            _Pickler(pickled, pickle.HIGHEST_PROTOCOL, buffer_callback=self._is_pickled).dump(content)
            self._pickled = pickled.getvalue()
            if self._memory:
                self._memory.flush()
        except BaseException:  # Ctrl-C too: the caller has nothing to close yet
            self.close()
            raise

    def _is_pickled(self, buffer: pickle.PickleBuffer) -> bool:
        """Return True if a buffer is small; otherwise write it to the file in memory instead of pickling it."""
        raw = buffer.raw()
        if raw.nbytes < LARGE or not SHARES:
            return True
        if self._memory is None:
            try:
                self._memory = open(os.memfd_create("fedhet"), "w+b")  # noqa: SIM115 - see `close`
            except OSError:  # too many open files
                return True
        start = self._memory.seek(-self._memory.tell() % _ALIGNED, io.SEEK_CUR)
        self._places.append((start, start + self._memory.write(raw)))
        return False

    def send(self, connection: Connection) -> None:
        """Send the object over a socket; raises an OSError if the receiver has ended."""
        connection.send((self._pickled, self._places))
        if self._memory:
            with _socket(connection) as there:
                socket.send_fds(there, [b"0"], [self._memory.fileno()])

    def close(self) -> None:
        """Close the file in memory; receivers keep their own mapping of it."""
        if self._memory:
            self._memory.close()


def _socket(connection: Connection) -> socket.socket:
    # Functions of `multiprocessing` that send file descriptors wait for the receiver, in Python 3.14 and on macOS.
    return socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)


def send(connection: Connection, content: object) -> None:
    """Send an object, or a `SharedMessage`, over a connection."""
    if isinstance(content, SharedMessage):
        content.send(connection)
        return
    with contextlib.closing(SharedMessage(content)) as message:
        message.send(connection)


def receive(connection: Connection) -> Any:
    """Receive an object, whose arrays are writable; raises an EOFError or OSError if the sender has ended."""
    pickled, places = connection.recv()
    memory = memoryview(b"")
    if places:
        with _socket(connection) as there:
            handles = socket.recv_fds(there, 1, 1)[1]
        if not handles:
            raise EOFError
        with open(handles[0], "rb") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return pickle.loads(pickled, buffers=[memory[start:end] for start, end in places])  # noqa: S301 - a child's


_Cached: Any = type(cache(len))  # of functools.cache and functools.lru_cache


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return lru_cache(**parameters)(function)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that passes the buffers of tensors and Flower arrays out of band, as NumPy does for its arrays."""

    def reducer_override(self, obj: Any) -> Any:
        """Pickle large arrays and tensors by their buffers."""
        if type(obj) is Array and len(obj.data) >= LARGE:
            return _array, (obj.dtype, obj.shape, obj.stype, pickle.PickleBuffer(obj.data))
        if type(obj) is Tensor and obj.nbytes >= LARGE and _plain(obj):
            return _tensor, (obj.dtype, obj.shape, pickle.PickleBuffer(obj.view(-1).view(torch.uint8).numpy().data))
        if type(obj) is _Cached and obj.__module__ == "__main__":  # which a child does not import
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


def _plain(tensor: Tensor) -> bool:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes and not vars(tensor)
    return whole and not (tensor.is_complex() or tensor.is_neg() or tensor.is_quantized or tensor.requires_grad)


def _array(dtype: str, shape: Sequence[int], stype: str, data: Any) -> Array:
    return Array(dtype, tuple(shape), stype, bytes(data))


def _tensor(dtype: torch.dtype, shape: Sequence[int], data: Any) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape)

"""Objects sent to another process, their large arrays in memory that both have.

A mark and a checksum before what is pickled find out bytes that something else in the other process has written to the
socket. Large buffers go beside what is pickled (protocol 5), in a file in memory without a name, whose descriptor goes
over the same socket: a process that is killed leaves nothing behind, and who gets the file has its pages, and copies of
those that it writes to. Where the system has no such files, everything is pickled.
"""

import contextlib
import io
import mmap
import os
import pickle
import socket
import struct
import zlib
from collections.abc import Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from fedhet.flower import Array

LARGE = 1 << 17
"""Bytes from which a buffer goes beside what is pickled."""

SHARES = hasattr(os, "memfd_create")
"""Whether there is such memory here."""

_ALIGNED, _PART = 64, 1 << 20
_MARK = b"\xf5fedhet\xf6"  # no text
_HEAD = struct.Struct("<8sIQ?")  # the mark, checksum and size of what is pickled, whether a descriptor comes behind it


class DamagedError(OSError):
    """A process sent something else than a message."""


class SharedMessage:
    """An object that cloudpickle can pickle as it is sent, as often as need be.

    Tensors, arrays of NumPy and of Flower are shared.
    """

    def __init__(self, content: object) -> None:
        pickled = io.BytesIO()
        self._beside: io.BufferedRandom | None = None
        self._places: list[tuple[int, int]] = []
        try:
            _Pickler(pickled, pickle.HIGHEST_PROTOCOL, buffer_callback=self._stays).dump(content)
            body = pickle.dumps(self._places) + pickled.getbuffer()
            self._bytes = _HEAD.pack(_MARK, zlib.crc32(body), len(body), self._beside is not None) + body
            if self._beside:
                self._beside.flush()
        except BaseException:  # nobody has it to close it, Ctrl-C included
            self.close()
            raise

    def _stays(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer is pickled; else it is written to the memory beside."""
        raw = buffer.raw()
        if raw.nbytes < LARGE or not SHARES:
            return True
        if self._beside is None:
            try:
                self._beside = open(os.memfd_create("fedhet"), "w+b")  # noqa: SIM115 - see `close`
            except OSError:  # none is allowed
                return True
        start = self._beside.seek(-self._beside.tell() % _ALIGNED, io.SEEK_CUR)
        self._places.append((start, start + self._beside.write(raw)))
        return False

    def send(self, connection: Connection) -> None:
        """Send it over a socket; raises `OSError` where nobody is there."""
        with _socket(connection) as sock:
            sock.sendall(self._bytes)
            if self._beside:
                reduction.sendfds(sock, [self._beside.fileno()])

    def close(self) -> None:
        """Let go of it; what was sent is there as long as who got it needs it."""
        if self._beside:
            self._beside.close()


def send(connection: Connection, content: object) -> None:
    """Send an object once, or a `SharedMessage` that is sent several times."""
    if isinstance(content, SharedMessage):
        content.send(connection)
        return
    with contextlib.closing(SharedMessage(content)) as message:
        message.send(connection)


def receive(connection: Connection, *, patience: float | None = None) -> Any:
    """Return the object of the next message; its arrays may be written to, and are this process's own then.

    An EOFError or OSError if who sends it has ended, sends no message, or nothing for `patience` seconds amid one.
    """
    with _socket(connection, patience) as sock:
        _, checksum, size, has_memory = _HEAD.unpack(_read(sock, _HEAD.size, begins=_MARK))
        sent = _read(sock, size)
        if zlib.crc32(sent) != checksum:
            raise DamagedError("what it sent is damaged")
        memory = _memory(sock) if has_memory else memoryview(b"")
    pickled = io.BytesIO(sent)
    places: list[tuple[int, int]] = pickle.load(pickled)  # noqa: S301 - of a process of one's own
    return pickle.load(pickled, buffers=[memory[start:end] for start, end in places])  # noqa: S301


def _read(sock: socket.socket, size: int, begins: bytes = b"") -> bytearray:
    """Read so many bytes, and find out at once where they do not begin as they must; raises as `receive`."""
    read = bytearray()
    while len(read) < size:
        part = sock.recv(min(size - len(read), _PART))
        if not part:
            raise EOFError
        read += part
        if not begins.startswith(read[: len(begins)]):
            raise DamagedError("something else than a message came from it")
    return read


def _memory(sock: socket.socket) -> memoryview:
    """Take in the memory whose descriptor comes next; raises as `receive`, or where no more files are allowed."""
    try:
        (descriptor,) = reduction.recvfds(sock, 1)
    except RuntimeError as error:
        raise OSError(f"the memory beside a message could not be taken in: {error}") from error
    with open(descriptor, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


@contextlib.contextmanager
def _socket(connection: Connection, patience: float | None = None) -> Iterator[socket.socket]:
    sock = socket.socket(fileno=connection.fileno())
    try:
        sock.settimeout(patience)
        yield sock
    except TimeoutError as error:
        raise DamagedError("it began a message and did not end it") from error
    finally:
        sock.settimeout(None)  # which is of the descriptor, and so of others that send
        sock.detach()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Has Flower's arrays and torch's tensors tell of their buffers, as NumPy's do."""

    def reducer_override(self, obj: Any) -> Any:
        """Pickle large arrays and tensors by their buffers."""
        if type(obj) is Array and len(obj.data) >= LARGE:
            return _array, (obj.dtype, obj.shape, obj.stype, pickle.PickleBuffer(obj.data))
        if type(obj) is Tensor and obj.nbytes >= LARGE and _plain(obj):
            return _tensor, (obj.dtype, obj.shape, pickle.PickleBuffer(obj.view(-1).view(torch.uint8).numpy().data))
        return super().reducer_override(obj)


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is what its bytes are, and all of its memory."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes and not vars(tensor)
    return whole and not (tensor.is_complex() or tensor.is_neg() or tensor.is_quantized or tensor.requires_grad)


def _array(dtype: str, shape: Sequence[int], stype: str, data: Any) -> Array:
    return Array(dtype, tuple(shape), stype, bytes(data))


def _tensor(dtype: torch.dtype, shape: Sequence[int], data: Any) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape)

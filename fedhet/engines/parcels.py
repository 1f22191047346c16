"""Objects sent to another process, their large arrays in memory that both have.

An object is pickled with its large buffers beside it (protocol 5), in a file in memory without a name, whose
descriptor goes over the same socket: a process that is killed leaves nothing behind. Who gets it has its pages, and
copies of those that it writes to. Where the system has no such files, everything is pickled.
"""

import contextlib
import io
import mmap
import os
import pickle
import socket
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch
from flwr.app import Array
from torch import Tensor

LARGE = 1 << 17
"""Bytes from which a buffer goes beside what is pickled."""

SHARES = hasattr(os, "memfd_create")
"""Whether there is such memory here."""

_ALIGNED = 64


class Parcel:
    """An object as it is sent, as often as need be.

    Args:
        content: what cloudpickle can pickle. Tensors, arrays of NumPy and of Flower are shared.

    Raises:
        Exception: whatever an object raises that cannot be pickled.
    """

    def __init__(self, content: object) -> None:
        pickled = io.BytesIO()
        self._beside: io.BufferedRandom | None = None
        self._places: list[tuple[int, int]] = []
        try:
            _Pickler(pickled, pickle.HIGHEST_PROTOCOL, buffer_callback=self._stays).dump(content)
            self._bytes = pickle.dumps(self._places) + pickled.getbuffer()
            if self._beside:
                self._beside.flush()
        except BaseException:  # nobody has it to close it, Ctrl-C included
            self.close()
            raise

    def _stays(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer is pickled; else it lies beside."""
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
        """Send it over a socket.

        Raises:
            OSError: nobody is there.
        """
        connection.send_bytes(self._bytes)
        if self._beside:
            with _socket(connection) as sock:
                reduction.sendfds(sock, [self._beside.fileno()])

    def close(self) -> None:
        """Let go of it; what was sent is there as long as who got it needs it."""
        if self._beside:
            self._beside.close()


def send(connection: Connection, content: object) -> None:
    """Send an object once; see `Parcel`."""
    with contextlib.closing(Parcel(content)) as parcel:
        parcel.send(connection)


def receive(connection: Connection) -> Any:
    """What was sent; arrays that were shared may be written to, and are this process's own then.

    Raises:
        EOFError, OSError: who sent it has ended.
    """
    pickled = io.BytesIO(connection.recv_bytes())
    places: list[tuple[int, int]] = pickle.load(pickled)  # noqa: S301 - of a process of one's own
    buffers = []
    if places:
        try:
            with _socket(connection) as sock:
                (beside,) = reduction.recvfds(sock, 1)
        except RuntimeError as error:  # this process may open no further file
            raise OSError(f"what was sent beside a message could not be taken in: {error}") from error
        with open(beside, "rb") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        buffers = [memory[start:end] for start, end in places]
    return pickle.load(pickled, buffers=buffers)  # noqa: S301


def _socket(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Has Flower's arrays and torch's tensors tell of their buffers, as NumPy's do."""

    def reducer_override(self, obj: Any) -> Any:
        """How an object is pickled."""
        if type(obj) is Array and len(obj.data) >= LARGE:
            return _array, (obj.dtype, obj.shape, obj.stype, pickle.PickleBuffer(obj.data))
        if type(obj) is Tensor and obj.nbytes >= LARGE and _plain(obj):
            return _tensor, (obj.dtype, obj.shape, pickle.PickleBuffer(obj.view(-1).view(torch.uint8).numpy().data))
        return super().reducer_override(obj)


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is what its bytes are, and all of its memory."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    alone = tensor.untyped_storage().nbytes() == tensor.nbytes and not vars(tensor)
    return alone and not (tensor.is_complex() or tensor.is_neg() or tensor.is_quantized or tensor.requires_grad)


def _array(dtype: str, shape: Sequence[int], stype: str, data: Any) -> Array:
    return Array(dtype, tuple(shape), stype, bytes(data))


def _tensor(dtype: torch.dtype, shape: Sequence[int], data: Any) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape)

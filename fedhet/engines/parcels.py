"""Objects sent to another process, their large arrays in memory that both have.

An object is pickled with its large buffers beside it (protocol 5). Each of them is a file in memory without a name,
whose descriptor goes over the same socket: a process that is killed leaves nothing behind. Who gets it has its pages,
and copies of those that it writes to. Where the system has no such files, everything is pickled.
"""

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

_AT_ONCE = 200  # descriptors in one message of a socket; Linux takes 253


class Parcel:
    """An object as it is sent, as often as need be.

    Args:
        content: what cloudpickle can pickle. Tensors, arrays of NumPy and of Flower may be shared, and no other data.

    Raises:
        Exception: whatever an object raises that cannot be pickled.
    """

    def __init__(self, content: object) -> None:
        self._blocks: list[int] = []
        self._pickled = io.BytesIO()
        try:
            _Pickler(self._pickled, pickle.HIGHEST_PROTOCOL, buffer_callback=self._stays).dump(content)
        except BaseException:
            self.close()
            raise

    def _stays(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer is pickled; else there is a block of it."""
        raw = buffer.raw()
        if raw.nbytes < LARGE or not hasattr(os, "memfd_create"):
            return True
        block = os.memfd_create("fedhet")
        self._blocks.append(block)
        with open(block, "wb", closefd=False) as file:
            file.write(raw)
        return False

    def send(self, connection: Connection) -> None:
        """Send it over a socket.

        Raises:
            OSError: nobody is there.
        """
        connection.send_bytes(len(self._blocks).to_bytes(4, "little"))
        connection.send_bytes(self._pickled.getbuffer())
        if self._blocks:
            with _socket(connection) as sock:
                for start in range(0, len(self._blocks), _AT_ONCE):
                    reduction.sendfds(sock, self._blocks[start : start + _AT_ONCE])

    def close(self) -> None:
        """Let go of it; what was sent is there as long as who got it needs it."""
        for block in self._blocks:
            os.close(block)
        self._blocks = []


def send(connection: Connection, content: object) -> None:
    """Send an object once; see `Parcel`."""
    parcel = Parcel(content)
    try:
        parcel.send(connection)
    finally:
        parcel.close()


def receive(connection: Connection) -> Any:
    """What was sent; arrays that were shared may be written to, and are this process's own then.

    Raises:
        EOFError, OSError: who sent it has ended.
    """
    count = int.from_bytes(connection.recv_bytes(), "little")
    pickled, blocks = connection.recv_bytes(), list[int]()
    try:
        if count:
            with _socket(connection) as sock:
                while len(blocks) < count:
                    blocks += reduction.recvfds(sock, min(_AT_ONCE, count - len(blocks)))
        buffers = [mmap.mmap(block, 0, access=mmap.ACCESS_COPY) for block in blocks]
    except RuntimeError as error:  # of a socket that ended in between
        raise EOFError(str(error)) from error
    finally:
        for block in blocks:
            os.close(block)
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301 - of a process of one's own


def _socket(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Has Flower's arrays and torch's tensors tell of their buffers, as NumPy's do."""

    def reducer_override(self, obj: Any) -> Any:
        """How an object is pickled."""
        if type(obj) is Array and len(obj.data) >= LARGE:
            return _array, (obj.dtype, obj.shape, obj.stype, pickle.PickleBuffer(obj.data))
        if type(obj) is Tensor and _plain(obj) and obj.nbytes >= LARGE:
            return _tensor, (obj.dtype, obj.shape, pickle.PickleBuffer(obj.view(-1).view(torch.uint8).numpy().data))
        return super().reducer_override(obj)


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is what its bytes are."""
    dense = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous()
    return dense and not tensor.is_complex() and not tensor.is_quantized and not tensor.requires_grad


def _array(dtype: str, shape: Sequence[int], stype: str, data: Any) -> Array:
    return Array(dtype, tuple(shape), stype, bytes(data))


def _tensor(dtype: torch.dtype, shape: Sequence[int], data: Any) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape)

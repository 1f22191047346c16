"""Send objects to another process, with large arrays in shared memory.

Large buffers are not pickled (protocol 5). They are written to a file in memory, and its descriptor is sent over the
same socket. The receiver maps the file, and copies the pages that it modifies. The file has no name, so nothing remains
if a process is killed. On systems without such files, everything is pickled.
"""

import contextlib
import io
import mmap
import os
import pickle
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from fedhet.flower import Array

LARGE = 1 << 17
"""Size in bytes from which a buffer is shared."""

SHARES = hasattr(os, "memfd_create")
"""Whether this system has files in memory."""

_ALIGNED = 64


class SharedMessage:
    """An object that is pickled once, by cloudpickle, and can be sent several times.

    Large tensors and arrays (NumPy and Flower) are placed in shared memory.
    """

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
        """Return True if a buffer is small and has to be pickled; otherwise write it to the file in memory."""
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
            reduction.send_handle(connection, self._memory.fileno(), None)

    def close(self) -> None:
        """Close the file in memory; receivers keep their own mapping of it."""
        if self._memory:
            self._memory.close()


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
        with open(reduction.recv_handle(connection), "rb") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return pickle.loads(pickled, buffers=[memory[start:end] for start, end in places])  # noqa: S301 - a child's


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that passes the buffers of tensors and Flower arrays out of band, as NumPy does for its arrays."""

    def reducer_override(self, obj: Any) -> Any:
        """Pickle large arrays and tensors by their buffers."""
        if type(obj) is Array and len(obj.data) >= LARGE:
            return _array, (obj.dtype, obj.shape, obj.stype, pickle.PickleBuffer(obj.data))
        if type(obj) is Tensor and obj.nbytes >= LARGE and _plain(obj):
            return _tensor, (obj.dtype, obj.shape, pickle.PickleBuffer(obj.view(-1).view(torch.uint8).numpy().data))
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

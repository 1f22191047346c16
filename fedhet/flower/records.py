"""Convert payloads to the records of Flower messages and back; arrays are checked on arrival, and nothing is pickled.

Each group of arrays is an `ArrayRecord`, and the plain values are a `ConfigRecord`. Arrays travel as raw bytes with
dtype and shape, at a fifth of the cost of Flower's own `stype`. Flower's format is used where Flower, its mods or a
user's code read them.
"""

import io
import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedhet.flower.insides import array_of, filled
from fedhet.messages import DTYPES, Arrays, Payload, WireError

STYPE = "fedhet.raw"
_name_of: Callable[[np.dtype[Any]], str] = cache(str)  # NumPy formats a dtype's name anew for every array
RESERVED = frozenset({"values", "request", "metrics", "report"})
"""Names of records that groups of arrays cannot have."""

# Decoded arrays are read-only views, and torch warns about the first read-only array of a process, which is this one.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))


class Encoder:
    """Converts payloads to Flower records; a group of arrays that several clients receive is encoded once."""

    def __init__(self, *, flower: bool = False) -> None:
        self._flower = flower
        self._done: dict[int, tuple[Arrays, ArrayRecord]] = {}

    def __call__(self, payload: Payload) -> RecordDict:
        """Return the record of a payload; raises a ValueError if a group of arrays has a reserved name."""
        if taken := RESERVED & payload.arrays.keys():
            raise ValueError(f"groups of arrays cannot be called {', '.join(sorted(taken))}: choose other names")
        record = RecordDict({name: self._record(group) for name, group in payload.arrays.items()})
        if payload.values:
            record["values"] = ConfigRecord(payload.values)
        return record

    def _record(self, group: Arrays) -> ArrayRecord:
        # The group is kept, so that no other object gets its id.
        if id(group) not in self._done:
            self._done[id(group)] = (group, encode_arrays(group, flower=self._flower))
        return self._done[id(group)][1]


def decode(record: RecordDict) -> Payload:
    """Return the payload of a record, with arrays that are read-only views; raise a WireError if it is damaged."""
    arrays = {name: decode_arrays(group) for name, group in record.items() if isinstance(group, ArrayRecord)}
    values = record["values"] if "values" in record else ConfigRecord()
    if RESERVED & arrays.keys() or not isinstance(values, ConfigRecord):
        raise WireError("the message's records have wrong types: send values in a ConfigRecord, arrays in ArrayRecords")
    return Payload(arrays, dict(values))


def decode_arrays(record: ArrayRecord) -> Arrays:
    """Return the arrays of a record, from raw bytes or Flower's format; raises a WireError if they cannot be read."""
    try:
        return {name: _decode(array) for name, array in record.items()}
    except (ValueError, TypeError, EOFError, OverflowError, SyntaxError) as error:
        raise WireError(f"the message's arrays cannot be read: {error}") from error


def encode_arrays(arrays: Arrays, *, flower: bool = False) -> ArrayRecord:
    """Return a record of arrays, as raw bytes or in Flower's format."""
    if flower:
        return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})
    raw = {name: array_of(_name_of(each.dtype), each.shape, STYPE, each.tobytes()) for name, each in arrays.items()}
    return filled(ArrayRecord(), raw)


def _decode(array: Array) -> np.ndarray[Any, Any]:
    dtype = DTYPES.get(array.dtype)
    if dtype is None:
        raise ValueError(f"dtype {array.dtype[:50]!r} is not supported: use one of {', '.join(DTYPES)}")
    if array.stype != STYPE:
        return _from_flower(array, dtype)
    _check_size(array.shape, dtype, len(array.data))
    if not array.data:  # frombuffer refuses an empty buffer
        return np.empty(array.shape, dtype)
    return np.frombuffer(array.data, dtype).reshape(array.shape)


def _from_flower(array: Array, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Decode an array in Flower's format, and check that its header has the declared dtype and shape."""
    source = io.BytesIO(array.data)
    version = np.lib.format.read_magic(source)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, actual = read(source)
    if (shape, actual) != (array.shape, dtype):
        raise ValueError(f"an array is {actual}{list(shape)}, but its record declares {dtype}{list(array.shape)}")
    _check_size(shape, dtype, len(array.data) - source.tell())
    return array.numpy()


def _check_size(shape: tuple[int, ...], dtype: np.dtype[Any], size: int) -> None:
    if len(shape) > 32 or any(length < 0 for length in shape) or math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{size} bytes do not fit an array {dtype}{list(shape[:32])}")

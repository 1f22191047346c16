"""Arrays to and from Flower records: raw bytes with dtype and shape, no pickle, checked on arrival.

What travels is a `Payload`: named groups of arrays (`"model"`, `"features"`, ...), each a Flower `ArrayRecord`, and
plain values, a `ConfigRecord`. Flower's own `stype` goes through `np.save`; raw bytes cost a fifth of it, and only
fedhet reads them: what Flower or a user is given, or its wrappers and mods look into, is in Flower's format.
"""

import io
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedhet.errors import FedhetError

Arrays = dict[str, np.ndarray[Any, Any]]
STYPE = "fedhet.raw"
RESERVED = frozenset({"values", "request", "metrics", "report"})
"""Names of the records that stand beside the groups of arrays."""
DTYPES = {
    name: np.dtype(name)
    for name in (
        "bool",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *(f"float{bits}" for bits in (16, 32, 64)),
    )
}
"""What arrays may be of, by name; all in this machine's order of bytes."""
LARGEST = 1e9
"""Numbers beyond this are none that training which has not diverged makes: sums of their squares must be finite."""


# Decoded arrays are read-only views; `as_read` hands them on as such, and nothing writes into them. torch warns of the
# first such array of a process, which is this one.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))


class WireError(FedhetError):
    """What came over the wire is not what was asked for."""


@dataclass
class Payload:
    """What one message carries: groups of named arrays, and plain values (text, bytes, numbers, flat lists)."""

    arrays: dict[str, Arrays] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays: what is counted as traffic."""
        return sum(array.nbytes for group in self.arrays.values() for array in group.values())


class Encoder:
    """Turns payloads into records; an array that goes to several clients is turned into bytes once.

    Args:
        flower: in Flower's format instead of raw bytes.
    """

    def __init__(self, *, flower: bool = False) -> None:
        self._flower = flower
        self._done: dict[int, tuple[Arrays, ArrayRecord]] = {}

    def __call__(self, payload: Payload) -> RecordDict:
        """The record of a payload.

        Raises:
            ValueError: a group goes by a name that is taken.
        """
        if taken := RESERVED & payload.arrays.keys():
            raise ValueError(f"groups of arrays cannot be called {', '.join(sorted(taken))}: choose other names")
        record = RecordDict()
        for name, group in payload.arrays.items():
            record[name] = self._record(group)
        if payload.values:
            record["values"] = ConfigRecord(payload.values)
        return record

    def _record(self, group: Arrays) -> ArrayRecord:
        # The group is kept beside its record, so that its id cannot be given to another object meanwhile.
        if id(group) not in self._done:
            self._done[id(group)] = (group, encode_arrays(group, flower=self._flower))
        return self._done[id(group)][1]


def decode(record: RecordDict) -> Payload:
    """The payload of a record; arrays are read-only views of the message's bytes.

    Raises:
        WireError: an array's bytes do not fit its dtype and shape, or are of a kind that cannot be read.
    """
    arrays = {name: decode_arrays(group) for name, group in record.items() if isinstance(group, ArrayRecord)}
    values = record["values"] if "values" in record else ConfigRecord()
    if RESERVED & arrays.keys() or not isinstance(values, ConfigRecord):
        raise WireError("records of values and of arrays are mixed up")
    return Payload(arrays, dict(values))


def decode_arrays(record: ArrayRecord) -> Arrays:
    """The arrays of one record, fedhet's or Flower's own.

    Raises:
        WireError: as `decode`.
    """
    try:
        return {name: _decode(array) for name, array in record.items()}
    except (ValueError, TypeError, EOFError, OverflowError, SyntaxError) as error:
        raise WireError(f"arrays cannot be read: {error}") from error


@lru_cache(maxsize=64)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """A dtype's name; NumPy puts it together anew at every call."""
    return dtype.name


def encode_arrays(arrays: Arrays, *, flower: bool = False) -> ArrayRecord:
    """One record of arrays: raw bytes, or in Flower's format."""
    if flower:
        return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})
    return record_of({name: _encode(array) for name, array in arrays.items()})


def record_of(arrays: Mapping[str, Array]) -> ArrayRecord:
    """A record of Flower's arrays, the same objects; Flower would look at each again."""
    record = ArrayRecord()
    record.__dict__["_data"].update(arrays.items())
    return record


def _encode(array: np.ndarray[Any, Any]) -> Array:
    made = Array.__new__(Array)  # its own way finds out which of three kinds of arguments it got, for ten times as long
    made.__dict__.update(dtype=dtype_name(array.dtype), shape=array.shape, stype=STYPE, data=array.tobytes())
    return made


def to_arrays(tensors: Mapping[str, torch.Tensor], dtype: str = "") -> Arrays:
    """Tensors as arrays, on the CPU and without a copy where that can be; floating ones cast to `dtype` if given."""
    return cast({name: _numpy(tensor.detach().cpu()) for name, tensor in tensors.items()}, dtype)


def cast(arrays: Arrays, dtype: str) -> Arrays:
    """The same arrays, floating ones as `dtype` if that is given; without a copy where they are so already."""
    return {name: _cast(array, dtype) for name, array in arrays.items()}


def to_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """An array as a tensor with memory of its own."""
    return torch.from_numpy(np.array(array))


def as_read(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """An array as a tensor that shares its memory: to be read on the spot, never written, since others read it too."""
    return torch.from_numpy(array)


def check(
    arrays: Arrays, expected: Mapping[str, tuple[tuple[int, ...], str]], what: str, *, exact: bool = True
) -> None:
    """Check arrays against expected names, shapes and dtypes, and that they are finite.

    Args:
        arrays: what came.
        expected: for each name its shape and dtype.
        what: names the arrays in the error, for example "model of client 3".
        exact: whether names beyond the expected are an error.

    Raises:
        WireError: naming the first array that is wrong, and what would be right.
    """
    missing, extra = expected.keys() - arrays.keys(), arrays.keys() - expected.keys()
    if missing or (extra and exact):
        raise WireError(f"{what}: missing {sorted(missing)[:3]}, unexpected {sorted(extra)[:3]}")
    for name, (shape, dtype) in expected.items():
        array = arrays[name]
        if array.shape != tuple(shape) or dtype_name(array.dtype) != dtype:
            raise WireError(f"{what}: {name} is {array.dtype.name}{list(array.shape)}, expected {dtype}{list(shape)}")
    check_finite(arrays, what)


def check_finite(arrays: Arrays, what: str) -> None:
    """Check that no array holds NaN, infinity, or a number that is as good as infinite (`LARGEST`).

    Raises:
        WireError: naming the array.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        for name, array in arrays.items():
            # A small sum of squares says that all are small; only if it is not, or overflows, each is looked at.
            if array.dtype.kind == "f" and array.size and not float(np.vdot(array, array)) <= LARGEST:
                largest = float(np.abs(array).max())
                if not math.isfinite(largest):
                    raise WireError(f"{what}: {name} has values that are not finite")
                if largest > LARGEST:
                    raise WireError(
                        f"{what}: {name} has values up to {largest:.1e}, beyond {LARGEST:.0e}: has training diverged?"
                    )


def _numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's array; bfloat16, which NumPy has not, as float32."""
    own: np.ndarray[Any, Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return own


def _cast(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    return array.astype(dtype) if dtype and array.dtype.kind == "f" and dtype_name(array.dtype) != dtype else array


def _decode(array: Array) -> np.ndarray[Any, Any]:
    dtype = DTYPES.get(array.dtype)
    if dtype is None:
        raise ValueError(f"there are none of dtype {array.dtype[:50]!r}, only of {', '.join(DTYPES)}")
    if array.stype != STYPE:
        return _flowers_own(array, dtype)
    _check_size(array.shape, dtype, len(array.data))
    if not array.data:  # frombuffer refuses an empty buffer
        return np.empty(array.shape, dtype)
    return np.frombuffer(array.data, dtype).reshape(array.shape)


def _flowers_own(array: Array, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An array as Flower itself sends it; what its header promises is compared with what is there before it is read."""
    source = io.BytesIO(array.data)
    version = np.lib.format.read_magic(source)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, found = read(source)
    if (shape, found) != (array.shape, dtype):
        raise ValueError(f"one is {found}{list(shape)}, and was said to be {dtype}{list(array.shape)}")
    _check_size(shape, dtype, len(array.data) - source.tell())
    return array.numpy()


def _check_size(shape: tuple[int, ...], dtype: np.dtype[Any], size: int) -> None:
    if len(shape) > 32 or any(length < 0 for length in shape) or math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{size} bytes are no {dtype}{list(shape[:32])}")

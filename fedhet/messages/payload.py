"""Payloads of messages (named groups of arrays, and plain values), and checks of received arrays and values."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from typing import Annotated, Any

import numpy as np
import torch

from fedhet.errors import FedhetError, ModelError
from fedhet.methods.options import kebab
from fedhet.tasks import LARGEST
from fedhet.utils.files import LONGEST_NAME, TAKEN_NAMES, plain_name
from fedhet.utils.process import standard_settings

Arrays = dict[str, np.ndarray[Any, Any]]
_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
DTYPES = {name: np.dtype(name) for name in _NAMES.split()}
"""Dtypes of arrays that can be sent, by name, in this machine's byte order."""

Spec = dict[str, tuple[tuple[int, ...], str]]
"""Shape and name of the dtype of arrays, by the arrays' names."""


class WireError(FedhetError):
    """Raised if a received message is invalid."""


@dataclass
class Payload:
    """The contents of one message: arrays by group and name, and text, bytes, numbers and flat lists by name."""

    arrays: dict[str, Arrays] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the payload's arrays, by which traffic is measured."""
        return sum(array.nbytes for group in self.arrays.values() for array in group.values())


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    """Convert tensors by name to NumPy arrays, without a copy if possible; bfloat16 becomes float32."""
    there = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    return {name: (each.float() if each.dtype == torch.bfloat16 else each).numpy() for name, each in there.items()}


def by_position(arrays: Arrays, names: Collection[str]) -> Arrays:
    """Rename arrays to `names`, in order, if they are named `0`, `1`, ..., as Flower names the arrays of a list."""
    listed = [*arrays] == [str(place) for place in range(len(names))]
    return dict(zip(names, arrays.values(), strict=True)) if listed else arrays


def to_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor with a copy of an array."""
    return torch.from_numpy(np.array(array))


def check(arrays: Arrays, expected: Spec, group: str) -> None:
    """Raise a WireError about the arrays, called `group`, unless they are finite, with shapes and dtypes `expected`."""
    missing, extra = expected.keys() - arrays.keys(), arrays.keys() - expected.keys()
    if missing or extra:
        raise WireError(
            f"error in {group}: arrays missing {sorted(missing)[:3]}, unexpected {sorted(extra)[:3]}; "
            "do not change the model during a run"
        )
    for name, (shape, dtype) in expected.items():
        array = arrays[name]
        if array.shape != tuple(shape) or array.dtype != DTYPES[dtype]:
            is_not = f"is {array.dtype.name}{list(array.shape)}, but must be {dtype}{list(shape)}"
            remedy = "convert it" if array.shape == tuple(shape) else "do not change the model during a run"
            raise WireError(f"error in {group}: array {name} {is_not}; {remedy}")
    check_finite(arrays, group)


def check_finite(arrays: Arrays, group: str) -> None:
    """Raise a WireError about the arrays, called `group`, unless their values are finite and at most 1e9."""
    with np.errstate(over="ignore", invalid="ignore"):
        for name, array in arrays.items():
            # A small sum of squares means that all values are small; otherwise each value is checked.
            if array.dtype.kind == "f" and array.size and not float(np.vdot(array, array)) <= LARGEST:
                largest = float(np.abs(array).max())
                if not largest <= LARGEST:
                    values = f"values up to {largest:.1e}" if math.isfinite(largest) else "values that are not finite"
                    raise WireError(f"error in {group}: {name} has {values}: training diverged, lower learning-rate")


def check_places(places: np.ndarray[Any, Any], count: int, name: str) -> None:
    """Raise a WireError, which calls `places` `name`, unless they are distinct integers (n,) from 0 to `count` - 1.

    What has `count` entries is then no longer if it is indexed by them.
    """
    if (
        places.ndim != 1
        or places.dtype.kind not in "iu"
        or len(places) > count
        or len(np.unique(places)) < len(places)
        or (len(places) and not 0 <= places.min() <= places.max() < count)
    ):
        raise WireError(
            f"the server sent {name} that are not distinct numbers from 0 to {count - 1}: use one version of fedhet"
        )


def bytes_of(spec: Spec) -> int:
    """Return the total size in bytes of arrays with the shapes and dtypes in `spec`."""
    return sum(math.prod(shape) * DTYPES[dtype].itemsize for shape, dtype in spec.values())


def spec_of(tensors: Mapping[str, torch.Tensor]) -> Spec:
    """Return shapes and dtypes of tensors as they are sent; raise a ModelError for a dtype such as complex64."""
    spec = {}
    for name, tensor in tensors.items():
        dtype = "float32" if tensor.dtype == torch.bfloat16 else str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ModelError(f"array {name} has dtype {dtype}, which cannot be sent: use one of {', '.join(DTYPES)}")
        spec[name] = (tuple(tensor.shape), dtype)
    return spec


def as_declared(arrays: Mapping[str, Any], specs: Iterable[Spec]) -> Arrays:
    """Return arrays by name, cast to their dtype in `specs`, if any; floats are rounded before a cast to integers."""
    dtypes = {name: DTYPES[dtype] for spec in specs for name, (_, dtype) in spec.items()}
    declared = {}
    for name, each in arrays.items():
        array = np.asarray(each)
        dtype = dtypes.get(name, array.dtype)
        rounded = dtype.kind in "iu" and array.dtype.kind == "f"
        declared[name] = np.asarray(np.rint(array) if rounded else array, dtype)
    return declared


def difference(spec: Spec, other: Spec) -> str:
    """Describe, for a message, the first array whose shape or dtype differs between two models, `spec` and `other`."""
    for name in [*spec, *other]:
        if spec.get(name) != other.get(name):
            ours, theirs = (f"{s[name][1]}{list(s[name][0])}" if name in s else "missing" for s in (spec, other))
            return f"its {name} is {ours}, the other's is {theirs}"
    return "its arrays are in another order"


def load_into(tensors: Mapping[str, torch.Tensor], arrays: Arrays) -> None:
    """Copy arrays into the state dict `tensors` in place; raise a ModelError if a name or shape differs."""
    for name, array in arrays.items():
        if name not in tensors or tuple(tensors[name].shape) != array.shape:
            expected = list(tensors[name].shape) if name in tensors else "no such tensor"
            raise ModelError(
                f"array {name} was received with shape {list(array.shape)}, but this network has {expected}: do not "
                "change the network during a run"
            )
    with torch.no_grad():
        for name, array in arrays.items():
            tensors[name].copy_(torch.from_numpy(array))


LEFT, RIGHT = ":left", ":right"  # suffixes that name an array's low-rank factors, as in `fc.weight:left`


def to_factors(after: Arrays, before: Arrays, energy: float) -> Arrays:
    """Return the differences `after` - `before` by name, as low-rank factors where these are smaller.

    A difference, flattened after the first axis to shape (m, n), is approximated by the arrays `NAME:left` (m, k) times
    `NAME:right` (k, n) from its singular value decomposition, with the smallest k whose squared singular values sum to
    the fraction `energy` of all. Integer arrays are returned as in `after`; arrays missing in `before` count as zeros.
    """
    packed: Arrays = {}
    for name, array in after.items():
        floating = array.dtype.kind == "f"
        packed[name] = change = np.asarray(array - before[name]) if floating and name in before else array
        if not floating or change.ndim < 2 or not change.size:
            continue
        matrix = torch.from_numpy(change.reshape(len(change), -1))
        with standard_settings():
            left, values, right = torch.linalg.svd(matrix.to(torch.promote_types(matrix.dtype, torch.float32)), False)
        kept = values.double().square().cumsum(0)
        rank = min(1 + int((kept < energy * kept[-1]).sum()), len(values))
        if rank * sum(matrix.shape) < change.size:
            del packed[name]
            # A message has the order C, and products of other orders round differently.
            packed[f"{name}{LEFT}"] = left[:, :rank].numpy().astype(change.dtype, order="C")
            packed[f"{name}{RIGHT}"] = (values[:rank, None] * right[:rank]).numpy().astype(change.dtype, order="C")
    return packed


def from_factors(packed: Arrays, before: Arrays, spec: Spec, group: str) -> Arrays:
    """Return the arrays `before` plus received differences (`packed`, the result of `to_factors`) after a check.

    `spec` has the shapes and dtypes of the result. Raises a WireError, which calls the arrays `group`, if a difference
    is missing or has an invalid shape, dtype or value.
    """
    expected: Spec = {}
    for name, (shape, dtype) in spec.items():
        if len(shape) > 1 and f"{name}{LEFT}" in packed:
            rows = shape[0]
            columns = math.prod(shape[1:])
            rank = min(sum(packed[f"{name}{LEFT}"].shape[1:2]), rows, columns)
            expected |= {f"{name}{LEFT}": ((rows, rank), dtype), f"{name}{RIGHT}": ((rank, columns), dtype)}
        else:
            expected[name] = shape, dtype
    check(packed, expected, group)
    after = add_factors(packed, before, spec)
    check_finite(after, group)
    return after


def add_factors(packed: Arrays, before: Arrays, spec: Spec) -> Arrays:
    """Return arrays `before` plus differences (`packed`, from `to_factors`), with shapes and dtypes as in `spec`."""
    after: Arrays = {}
    for name, (shape, dtype) in spec.items():
        if (change := packed.get(name)) is None:
            left, right = (torch.from_numpy(packed[f"{name}{side}"]) for side in (LEFT, RIGHT))
            with standard_settings():
                change = (left @ right).numpy().reshape(shape)
        added = change.dtype.kind == "f" and name in before
        after[name] = np.asarray(before[name] + change if added else change, dtype=dtype)
    return after


Name = Annotated[str, "can be the name of a file"]
Text = Annotated[str, "has several lines"]
"""Type of a field that has several lines of text; a `Name` is a valid file name, and a `str` is one line."""

LONGEST = 200
"""Largest number of characters in a received name or line of text."""


class Fields:
    """The fields of a received record, such as a reply's values; each field is checked when it is read.

    The methods read the field `key`; they return `default` if it is missing. They raise a WireError if it is invalid,
    or missing without a default. `fields` has the values by key, and `where` names the record in errors.
    """

    def __init__(self, fields: Mapping[str, Any], where: str = "the client's reply") -> None:
        self._fields, self._where = fields, where

    def plain(self, dataclass: Any) -> dict[str, Any]:
        """Return the text, number and boolean fields of the class `dataclass` that are present, for its constructor."""
        values = {}
        for entry, key in named_fields(dataclass):
            if key in self._fields or entry.default is MISSING:
                default = None if entry.default is MISSING else entry.default
                limits = {name: limit for name, limit in entry.metadata.items() if name != "key"}
                values[entry.name] = getattr(self, READERS[entry.type])(key, default, **limits)
        return values

    def text(self, key: str, default: str | None = None, *, longest: int = LONGEST) -> str:
        """Return the entry `key`, text of at most `longest` characters, or `default` if it is missing."""
        right = f"text of at most {longest} characters"
        return str(self._read(key, default, str, right, lambda text: len(text) <= longest))

    def line(self, key: str, default: str | None = None, *, longest: int = LONGEST) -> str:
        """Return the field `key`, one line of printable text, or `default` if it is missing."""
        right = f"printable text of one line, of at most {longest} characters"
        return str(self._read(key, default, str, right, lambda text: len(text) <= longest and text.isprintable()))

    def name(self, key: str, default: str | None = None) -> str:
        """Return the field `key`, text that is a valid file name, or `default` if it is missing."""
        right = (
            f"a name that a file can have: printable, of at most {LONGEST_NAME} bytes, without slashes, not hidden, "
            f"and not one of {', '.join(sorted(TAKEN_NAMES))}"
        )
        return str(self._read(key, default, str, right, lambda name: name == default or plain_name(name)))

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return the field `key`, a boolean, or `default` if it is missing."""
        return bool(self._read(key, default, bool, "true or false"))

    def count(self, key: str, default: int | None = None, *, at_least: int = 0, at_most: int = 2**53) -> int:
        """Return the field `key`, a whole number from `at_least` to `at_most`, or `default` if it is missing."""
        least = at_least if default is None else min(at_least, default)
        right = f"a whole number from {at_least} to {at_most}"
        return int(self._read(key, default, int, right, lambda number: least <= number <= at_most))

    def number(self, key: str, default: float | None = None) -> float:
        """Return the field `key`, a number of magnitude up to 1e9, or `default` if it is missing."""
        right = f"a number up to {LARGEST:.0e}: training diverged, lower learning-rate"
        return float(self._read(key, default, int | float, right, lambda number: abs(number) <= LARGEST))

    def _read(
        self, key: str, default: Any, kind: Any, right: str, good: Callable[[Any], bool] = lambda value: True
    ) -> Any:
        value = self._fields.get(key, default)
        if value is None:
            raise WireError(f"error in {self._where}: {key} is missing; use the server's version of fedhet")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or not good(value):
            raise WireError(f"error in {self._where}: {key} is {shortened(value)}, but must be {right}")
        return value


READERS: dict[Any, str] = {
    **{str: "line", Name: "name", Text: "text", int: "count", bool: "flag", float: "number"},
    float | None: "number",
}
"""Name of the method of `Fields` that reads a dataclass field, by the field's type."""


@cache
def named_fields(dataclass: Any) -> list[tuple[Field[Any], str]]:
    """Return the text, number and boolean fields of `dataclass` as pairs (field, its key in a message)."""
    plain = [field for field in fields(dataclass) if field.type in READERS]
    return [(field, field.metadata.get("key", kebab(field.name))) for field in plain]


def written(record: Any) -> dict[str, Any]:
    """Return the text, number and boolean fields of a dataclass object that differ from their default, by key."""
    kind: Any = type(record)
    values = {key: (getattr(record, field.name), field.default) for field, key in named_fields(kind)}
    return {key: value for key, (value, default) in values.items() if value != default}


def shortened(value: object) -> str:
    """Return the first hundred characters of a received value's `repr`, for an error message."""
    shown = repr(value[:100] if isinstance(value, str | bytes | list) else value)
    return shown if len(shown) <= 100 else shown[:100] + "..."

"""Read rows of a user's dataset on demand, and convert columns, images and labels to tensors.

Callers prepend the name of the client's part, such as "train: ", to the message of a `DataError`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from fedhet.errors import DataError, FedhetError, UserCodeError
from fedhet.utils.inputs import Inputs, parts_of, together

INPUTS = ("image", "img", "pixel_values", "inputs", "input", "features", "x", "data")
LABELS = ("label", "labels", "target", "targets", "fine_label", "y")
"""Known names of columns, including those of Hugging Face's datasets."""

Collate = Callable[[Sequence[Any]], Any]
"""Combines rows into a batch, as the `collate_fn` of a `DataLoader`."""


@dataclass(eq=False)
class LazyInputs:
    """Inputs of some rows of a dataset, read on demand; used like a tensor (n, ...).

    If `collate` is None, inputs are stacked. `relabel` converts the labels that are read together with inputs, and
    `part` is the name of the client's part in messages, such as `train`.
    """

    dataset: Any
    collate: Collate | None
    rows: Tensor
    device: str | torch.device = "cpu"
    part: str = ""
    relabel: Callable[[Tensor], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        """Read the inputs of the rows `index`."""
        return self.pairs(index)[0]

    def pairs(self, index: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Read inputs and labels of some rows, in the order in which the collate function returns them.

        Raises a `DataError` if inputs are not finite or rows cannot be used.
        """
        rows = self.rows[index.cpu() if isinstance(index, Tensor) else index]
        try:
            inputs, labels = _read(self.dataset, rows.tolist(), self.collate)
            check_finite(inputs, "inputs", rows)
        except DataError as error:
            raise type(error)(f"{self.part}: {error}".removeprefix(": ")) from error
        return inputs.to(self.device), (self.relabel(labels) if self.relabel else labels).to(self.device)

    def subset(self, rows: Tensor) -> "LazyInputs":
        """Return the inputs of some of the rows, without reading them."""
        return replace(self, rows=self.rows[rows])

    def to(self, device: torch.device) -> "LazyInputs":
        """Return inputs whose batches are moved to a device when they are read."""
        return replace(self, device=device)


def spans(count: int, size: int) -> list[slice]:
    """Return slices of `size` rows each that cover `count` rows; a single last row belongs to the slice before it.

    BatchNorm without running statistics cannot normalise a single row.
    """
    starts = [start for start in range(0, count, size) if start == 0 or count - start > 1]
    return [slice(start, end) for start, end in pairwise([*starts, count])]


def labels_of(dataset: Any, collate: Collate | None, rows: Tensor) -> Tensor:
    """Return the labels of rows, from the dataset's list of labels if it has one, or by reading each row once."""
    if collate is None and (known := _known_labels(dataset)) is not None and len(known) == len(dataset):
        return as_labels(known)[rows]
    return as_labels(torch.cat([_read(dataset, part.tolist(), collate)[1] for part in rows.split(256)]))


def _known_labels(dataset: Any) -> Any:
    """Return the list of labels of a torchvision or Hugging Face dataset, or None if rows can have other labels."""
    if type(dataset) is Subset:
        known = _known_labels(dataset.dataset)
        return None if known is None else torch.as_tensor(known)[torch.as_tensor(dataset.indices, dtype=torch.int64)]
    module = type(dataset).__module__
    if module == "datasets.arrow_dataset" and dataset.format["type"] != "custom":  # Hugging Face, rows as they are
        labels = [name for name in LABELS if name in dataset.column_names]
        return dataset.with_format(None)[labels[0]][:] if len(labels) == 1 else None
    joint = type(getattr(dataset, "transforms", None)).__name__ not in ("NoneType", "StandardTransform")
    if joint or not module.startswith("torchvision.datasets.") or dataset.target_transform is not None:
        return None
    known = next((getattr(dataset, name) for name in ("targets", "labels", "_labels") if hasattr(dataset, name)), None)
    return known if isinstance(known, Tensor | np.ndarray | list) else None


def _read(dataset: Any, rows: list[int], collate: Collate | None) -> tuple[Tensor, Tensor]:
    several = getattr(dataset, "__getitems__", None)
    try:
        with torch.no_grad():  # which is restored if user code changes it
            read = list(several(rows)) if several else [dataset[row] for row in rows]
            collated = read if collate is None else collate(read)
    except FedhetError:
        raise
    except (Exception, SystemExit) as error:
        raise UserCodeError.of(error, f"reading rows of {type(dataset).__name__}") from error
    if collate is not None:
        pair = pair_of(collated)
        batch = as_tensor(pair[0]), as_labels(pair[1])
        if not len(batch[0]) == len(batch[1]) == len(rows):
            raise DataError(
                f"the collate function returned {len(batch[0])} inputs and {len(batch[1])} labels for {len(rows)} "
                "rows: leave rows out of the dataset instead"
            )
        return batch[0].detach(), batch[1].detach()
    inputs, labels = zip(*map(pair_of, read), strict=True)
    return _stacked(inputs).detach(), as_labels(labels).detach()


def not_finite(tensor: Tensor) -> tuple[int, float] | None:
    """Return the first row of a tensor with NaN or infinity, and that value; None if all are finite."""
    if isinstance(tensor, Inputs):
        return next(filter(None, map(not_finite, tensor.parts.values())), None)
    if not (tensor.is_floating_point() or tensor.is_complex()) or bool(tensor.isfinite().all()):
        return None
    row = next(row for row, each in enumerate(tensor) if not each.isfinite().all())
    values = tensor[row].flatten()
    return row, values[~values.isfinite()][0].item()


def check_finite(tensor: Tensor, kind: str, rows: Sequence[Any] | Tensor) -> None:
    """Raise a `DataError` that names the row if a tensor of inputs or labels has NaN or infinity."""
    if (odd := not_finite(tensor)) is not None:
        raise DataError(f"the {kind} of row {rows[odd[0]]} contain {odd[1]}: remove such rows, or replace the values")


def pair_of(row: Any) -> tuple[Any, Any]:
    """Return inputs and labels, given as a pair or as a mapping with columns by name.

    If a column is `input_ids`, all columns but labels and texts are inputs, such as those of a tokenizer.
    """
    if not isinstance(row, Mapping):
        if isinstance(row, tuple | list) and len(row) == 2:
            return row[0], row[1]
        kind = "None" if row is None else f"of type {type(row).__name__}"
        raise DataError(f"a row must be a pair (input, label) or a dict of both, not {kind}")
    others = [name for name in row if name not in LABELS]
    tokens = [name for name in others if not _is_text(row[name])] if "input_ids" in row else []
    inputs = tokens or [name for name in INPUTS if name in row] or (others if len(others) == 1 else [])
    labels = [name for name in LABELS if name in row]
    if not inputs or not labels:
        raise DataError(
            f"the columns {', '.join(row)} do not name inputs and labels: rename the inputs to {INPUTS[0]} and "
            f"the labels to {LABELS[0]}, or give pairs (input, label)"
        )
    for kind, names in (("inputs", inputs[: 1 if tokens else None]), ("labels", labels)):
        if len(names) > 1:
            raise DataError(f"{' and '.join(names)} can both be the {kind}: keep one, or give pairs (input, label)")
    return {name: row[name] for name in inputs} if tokens else row[inputs[0]], row[labels[0]]


def _is_text(column: Any) -> bool:
    return isinstance(column[0] if isinstance(column, list) and column else column, str)


def as_tensor(value: Any) -> Tensor:
    """Convert inputs to a tensor; a PIL image becomes (channels, height, width), uint8, or float32 beyond 8 bits.

    A dict, or a tuple of tensors or arrays, becomes `Inputs` of several tensors, unless it has one entry.
    """
    if isinstance(value, tuple) and value and all(isinstance(each, Tensor | np.ndarray) for each in value):
        value = {str(place): each for place, each in enumerate(value)}
    if isinstance(value, Mapping) and value:
        parts = {str(name): as_tensor(each) for name, each in value.items()}
        return together(parts) if len(parts) > 1 else next(iter(parts.values()))
    if isinstance(value, list) and value and not isinstance(value[0], int | float | list):
        return _stacked(value)
    if hasattr(value, "getbands"):  # a PIL image
        if value.mode[0] in "IF":  # more than 8 bits, which RGB would clip
            return torch.from_numpy(np.array(value, np.float32)[None])
        image = value if value.mode in ("L", "RGB", "RGBA") else value.convert("RGB")
        return torch.from_numpy(np.atleast_3d(np.array(image))).permute(2, 0, 1).contiguous()
    value = _dense(value, "inputs")
    try:
        tensor = torch.as_tensor(_native(value) if isinstance(value, np.ndarray) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"inputs have type {_kind(value)}: give them as numbers") from error
    return tensor.float() if tensor.dtype == torch.float64 and not isinstance(value, Tensor) else tensor


def _dense(value: Any, what: str) -> Any:
    """Return `value` as an array if it is a pandas object; raise a `DataError` about `what` if values are not dense."""
    if isinstance(value, Tensor) and value.is_meta:
        raise DataError(f"{what} are on the device meta, which has no values: create them on the CPU")
    if isinstance(value, Tensor) and value.is_nested:
        raise DataError(f"{what} are a nested tensor: pad the rows to one length (to_padded_tensor)")
    if hasattr(value, "toarray") or (isinstance(value, Tensor) and value.layout is not torch.strided):
        dense = "to_dense" if isinstance(value, Tensor) else "toarray"
        raise DataError(f"{what} are sparse, of type {type(value).__name__}: make them dense with {what}.{dense}()")
    if isinstance(value, np.ma.MaskedArray) and value.mask.any():
        raise DataError(f"{what} have masked values, which networks cannot read: replace them with {what}.filled(...)")
    if hasattr(value, "to_numpy") and not isinstance(value, Tensor):
        return value.to_numpy()
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        lengths = sorted({len(row) for row in value if isinstance(row, list | tuple) or np.ndim(row)})
        if len(lengths) > 1:
            raise DataError(f"{what} have different lengths, {lengths[0]} and {lengths[1]}: pad or cut the rows")
    return value


def _kind(value: Any) -> str:
    """Return the name of the type of the first entry that is not a number, for messages."""
    entries = np.asarray(value, object).flat
    odd = next((each for each in entries if not isinstance(each, int | float | np.number)), value)
    return "None" if odd is None else type(odd).__name__


def _stacked(values: Sequence[Any]) -> Tensor:
    inputs = [as_tensor(each) for each in values]
    if len({tuple(parts_of(each)) for each in inputs}) > 1:
        raise DataError("rows have different numbers or names of inputs: give every row the same inputs")
    for name in parts_of(inputs[0]):
        if len(shapes := {tuple(parts_of(each)[name].shape) for each in inputs}) > 1:
            one, other = sorted(shapes)[:2]
            raise DataError(f"{name} have different shapes, {list(one)} and {list(other)}: pad them in the collate_fn")
        if len({parts_of(each)[name].dtype == torch.uint8 for each in inputs}) > 1:
            raise DataError(f"{name} are bytes, which are scaled to [0, 1], in some rows only: give all in one form")
    return torch.stack(inputs)


def _native(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert an array to a form that torch accepts: without Python objects, foreign byte order or negative strides."""
    if array.dtype == object:
        array = np.array(array.tolist())  # raises a ValueError for different shapes
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array) if any(stride < 0 for stride in array.strides) else array


def as_labels(value: Any) -> Tensor:
    """Convert labels to a tensor: (n,) int64 classes, (n, labels) of 0 and 1 or floats, or (n, h, w) for pixels.

    Labels of pixels keep their integer type; an axis of one channel is removed.
    """
    if isinstance(value, list | tuple):
        value = [np.array(each) if hasattr(each, "getbands") else each for each in value]  # PIL images
    value = _dense(value, "labels")
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor | np.ndarray):
        value = torch.stack([torch.as_tensor(each) for each in value])
    try:
        labels = torch.as_tensor(value if isinstance(value, Tensor) else _native(np.asarray(value)))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"labels have type {_kind(value)}: number the classes from 0, in the same way for all clients"
        ) from error
    if labels.ndim > 2:
        labels = labels.squeeze(1) if labels.ndim > 3 else labels
        return labels.float() if labels.is_floating_point() else labels
    if labels.is_floating_point():
        return labels.float().reshape(len(labels), -1)
    return (labels.squeeze(1) if labels.ndim == 2 and labels.shape[1] == 1 else labels).long()

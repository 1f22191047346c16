"""Inputs that are read on demand from a user's dataset, and conversion of columns, images and labels to tensors."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Subset

from fedhet.errors import DataError, FedhetError, UserCodeError
from fedhet.tasks.metrics import IGNORED
from fedhet.utils.inputs import for_each, parts_of, together

# Known names of columns, including those of Hugging Face's datasets.
INPUTS = ("image", "img", "pixel_values", "inputs", "input", "features", "x", "data")
LABELS = ("label", "labels", "target", "targets", "fine_label", "y")
IDENTIFIERS = ("id", "idx", "index", "uid")
"""Last words of the names of columns that identify examples."""
Collate = Callable[[Sequence[Any]], Any]
"""A function that combines rows into a batch, as the `collate_fn` of a `DataLoader`."""


@dataclass(eq=False)
class LazyInputs:
    """Inputs of a user's `dataset` at the indices `rows` (n,), read on demand; used like a tensor (n, ...).

    `collate` combines rows into a batch; if None, inputs are stacked. Batches are moved to `device`. `relabel` converts
    the labels that are read with the inputs. Error messages begin with `part`, such as `client 0: train`.
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
        return self.pairs(index)[0]

    def pairs(self, index: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Read the examples at the positions `index` in `rows`; return their inputs (k, ...) and labels (k, ...).

        A user's `collate` may change the order of examples, but the i-th label belongs to the i-th input. Raises a
        `DataError` if inputs are not finite or rows cannot be converted to tensors.
        """
        rows = self.rows[index.cpu() if isinstance(index, Tensor) else index]
        try:
            inputs, labels = _read(self.dataset, rows.tolist(), self.collate)
            check_finite(inputs, "inputs", rows)
        except DataError as error:
            raise type(error)(f"{self.part}: {error}".removeprefix(": ")) from error
        return moved(inputs, self.device), moved(self.relabel(labels) if self.relabel else labels, self.device)

    def subset(self, rows: Tensor) -> "LazyInputs":
        """Return the inputs at the positions `rows` (k,), without reading them."""
        return replace(self, rows=self.rows[rows])

    def to(self, device: torch.device) -> "LazyInputs":
        """Return inputs whose batches are moved to a device when they are read."""
        return replace(self, device=device)


def single(tensor: Tensor) -> Tensor:
    """Return a tensor, or the tensors of an `Inputs`, with float64 values as float32; other types are unchanged."""
    return for_each(tensor, lambda part: part.float() if part.dtype == torch.float64 else part)


def moved(values: Any, device: str | torch.device) -> Any:
    """Return a tensor or lazy inputs on a device; tensors in float32 if the device (Apple's GPUs) has no float64."""
    alone = isinstance(values, LazyInputs) or torch.device(device).type != "mps"
    return (values if alone else single(values)).to(device)


def spans(count: int, size: int) -> list[slice]:
    """Return slices of `size` rows each that cover `count` rows; a single last row belongs to the slice before it."""
    # A single row is avoided, since BatchNorm without running statistics cannot normalise it.
    starts = [start for start in range(0, count, size) if start == 0 or count - start > 1]
    return [slice(start, end) for start, end in pairwise([*starts, count])]


def labels_of(dataset: Any, collate: Collate | None, rows: Tensor) -> Tensor:
    """Return the labels at the indices `rows`, from the dataset's list of labels if known, or read with `collate`."""
    if collate is None and (labels := _known_labels(dataset)) is not None:
        return as_labels(labels)[rows]
    batches = [_read(dataset, part.tolist(), collate)[1] for part in rows.split(256)]
    if len({batch.shape[1:] for batch in batches}) > 1:  # padded by `collate`, each to its own length
        if batches[0].is_floating_point():
            raise DataError(
                "the labels of the collate_fn are numbers, and their shapes differ from batch to batch: pad all to one "
                "length, since a value that pads them would count"
            )
        padded = pad_sequence([row for batch in batches for row in batch], batch_first=True, padding_value=IGNORED)
        batches = [padded]
    return as_labels(torch.cat(batches))


def _known_labels(dataset: Any) -> Any:
    """Return all labels if a torchvision or Hugging Face dataset stores them and does not transform them, else None."""
    if type(dataset) is Subset:
        known = _known_labels(dataset.dataset)
        return None if known is None else torch.as_tensor(known)[torch.as_tensor(dataset.indices, dtype=torch.int64)]
    module = type(dataset).__module__
    if module == "datasets.arrow_dataset" and dataset.format["type"] != "custom":  # Hugging Face, rows as they are
        labels = [name for name in LABELS if name in dataset.column_names]
        return dataset.with_format(None)[labels[0]][:] if len(labels) == 1 else None
    if not module.startswith("torchvision.datasets.") or dataset.target_transform is not None:
        return None
    known = getattr(dataset, "targets", None)  # of some datasets, names of files
    files = getattr(dataset, "samples", getattr(dataset, "imgs", None))
    if known is not None and files is not None:  # which rows are read from, whatever the targets are now
        known = [label for _, label in files]
    classes = isinstance(known, Tensor) or (isinstance(known, list) and all(isinstance(each, int) for each in known))
    return known if classes else None


def _read(dataset: Any, rows: list[int], collate: Collate | None) -> tuple[Tensor, Tensor]:
    several = getattr(dataset, "__getitems__", None)
    try:
        with torch.no_grad():  # which is restored if user code changes it
            read = list(several(rows)) if several else [dataset[row] for row in rows]
            if collate is None:
                inputs, labels = zip(*map(pair_of, read), strict=True)
                return _stacked(inputs).detach(), as_labels(labels).detach()
            pair = pair_of(collate(read), whole=True)
            batch = as_tensor(pair[0]), as_labels(pair[1])
    except FedhetError:
        raise
    except (Exception, SystemExit) as error:
        raise UserCodeError.of(error, f"reading rows of {type(dataset).__name__}") from error
    if not len(batch[0]) == len(batch[1]) == len(rows):
        raise DataError(
            f"the collate function returned {len(batch[0])} inputs and {len(batch[1])} labels for {len(rows)} rows: "
            "return every row, and remove unwanted rows from the dataset"
        )
    return batch[0].detach(), batch[1].detach()


_missing_allowed: ContextVar[bool] = ContextVar("missing_allowed", default=False)


@contextmanager
def missing_allowed(allowed: bool) -> Iterator[None]:
    """Context manager in which inputs may have missing values (NaN) if `allowed`, since they are only described."""
    token = _missing_allowed.set(allowed)
    try:
        yield
    finally:
        _missing_allowed.reset(token)


def check_finite(tensor: Tensor, kind: str, rows: Sequence[Any] | Tensor, columns: Sequence[str] = ()) -> None:
    """Check that a tensor (n, ...) has no NaN or infinity; raise a `DataError` otherwise.

    Its message names the `kind` of tensor, such as `inputs`, and the first bad row by its entry in `rows`; of a table
    whose `columns` have names, also the column.
    """
    for part in parts_of(tensor).values():
        if _missing_allowed.get() and kind == "inputs":
            part = part.nan_to_num(posinf=math.inf, neginf=-math.inf)
        if (part.is_floating_point() or part.is_complex()) and not bool(part.isfinite().all()):
            row = next(row for row, example in enumerate(part) if not example.isfinite().all())
            values = part[row].flatten()
            place = int((~values.isfinite()).nonzero()[0])
            column = f" in column {columns[place]}" if len(columns) == len(values) else ""
            found = f"the {kind} of row {rows[row]} contain {values[place].item()}{column}"
            raise DataError(f"{found}: remove such rows, or replace the values")


def pair_of(row: Any, *, whole: bool = False) -> tuple[Any, Any]:
    """Return the input and the label of a row, or of a `whole` table: a pair or a mapping from columns to values.

    If a column is `input_ids`, as from a tokenizer, the input has all columns except for labels, texts and `idx`.
    """
    if not isinstance(row, Mapping):
        if isinstance(row, tuple | list) and len(row) == 2:
            return row[0], row[1]
        kind = "None" if row is None else f"of type {type(row).__name__}"
        if isinstance(row, tuple | list):
            kind = f"{len(row)} values"
        if isinstance(row, tuple | list) and len(row) > 2:
            kind += ": leave out the others, in the dataset or in the collate_fn of a DataLoader"
        raise DataError(f"a row or batch must be a pair (input, label) or a dict of columns, not {kind}")
    labels, others = [name for name in row if name in LABELS], [name for name in row if name not in LABELS]
    columns = {name: row[name] for name in others if "input_ids" in row and name not in IDENTIFIERS}
    tokens = {n: c for n, c in columns.items() if not isinstance(c[0] if isinstance(c, list) and c else c, str)}
    inputs = ["input_ids"] if tokens else [name for name in others if name in INPUTS] or others
    if len(inputs) != 1 or len(labels) != 1:
        raise DataError(
            f"the columns {', '.join(row)} must include one for inputs, such as {INPUTS[0]}, and one for labels, such "
            f"as {LABELS[0]}: rename or remove columns, or give pairs (input, label)"
        )
    unused = [name for name in others if not tokens and name not in inputs and _is_feature(name, row[name], whole)]
    if unused:
        raise DataError(
            f"the columns {', '.join(unused)} have numbers, but the inputs are the column {inputs[0]}: join them to "
            "one array, or remove the columns that are not inputs"
        )
    return tokens or row[inputs[0]], row[labels[0]]


def _is_feature(name: str, value: Any, whole: bool) -> bool:
    """Return whether a value of a row, or a column, may describe the examples: numbers, and no labels or identifier."""
    # The table `frame` of scikit-learn's data sets has inputs and labels again; pandas adds `__index_level_0__`.
    again = name.startswith("__") or (name == "frame" and hasattr(value, "columns"))
    if again or name.split("_")[-1] in (*LABELS, *IDENTIFIERS):
        return False
    with suppress(Exception):  # rows of several lengths have no array
        return np.asarray(value).dtype.kind in "biuf" and not (whole and np.ndim(value) == 0)  # a number is no column
    return False


def as_tensor(value: Any) -> Tensor:
    """Convert an array, list or PIL image to a tensor, and a dict or tuple of several arrays to `Inputs`.

    An image becomes (channels, height, width), as uint8 or, if its pixels have more than 8 bits, as float32.
    """
    if isinstance(value, tuple) and value and all(isinstance(part, Tensor | np.ndarray) for part in value):
        value = {str(place): part for place, part in enumerate(value)}
    if isinstance(value, Mapping) and value:
        parts = {str(name): as_tensor(part) for name, part in value.items()}
        return together(parts) if len(parts) > 1 else next(iter(parts.values()))
    if isinstance(value, list) and value and not isinstance(value[0], int | float | list):
        return _stacked(value)
    if hasattr(value, "getbands"):  # a PIL image
        if value.mode[0] in "IF":  # more than 8 bits, which RGB would clip
            return torch.from_numpy(np.array(value, np.float32)[None])
        image = value if value.mode in ("L", "RGB", "RGBA") else value.convert("L" if value.mode == "1" else "RGB")
        return torch.from_numpy(np.atleast_3d(np.array(image))).permute(2, 0, 1).contiguous()
    return _dense(value, "inputs", "give numbers, in rows of one length")


def _dense(value: Any, what: str, remedy: str) -> Tensor:
    """Convert an array to a dense tensor; a `DataError` calls the array `what` and ends with `remedy`."""
    if isinstance(value, Tensor):
        sparse = value.layout is not torch.strided or value.is_meta or value.is_nested
    else:  # SciPy's sparse matrices have the method
        sparse = hasattr(value, "toarray") or bool(isinstance(value, np.ma.MaskedArray) and value.mask.any())
    if sparse:
        kind = type(value).__name__
        raise DataError(f"the {what} (type {kind}) are sparse, nested, masked or on the meta device: give dense arrays")
    if isinstance(value, Tensor):
        return value
    if fields := getattr(getattr(value, "dtype", None), "names", None):
        raise DataError(
            f"the {what} are a structured array with the fields {', '.join(fields)}: give a column for each, as "
            "numpy.lib.recfunctions.structured_to_unstructured does"
        )
    table = value
    value = value.to_numpy() if hasattr(value, "to_numpy") else value
    try:
        array = np.asarray(value.tolist() if getattr(value, "dtype", None) == np.object_ else value)
        if array.dtype.kind not in "biufc":
            raise TypeError(f"type {array.dtype.type.__name__}")
        return torch.as_tensor(np.asarray(array, array.dtype.newbyteorder("="), order="C"))
    except (TypeError, ValueError, RuntimeError) as error:
        parts = ((name, table[name]) for name in getattr(table, "columns", ()))
        columns = [repr(n) for n, c in parts if c.to_numpy().dtype.kind not in "biuf" or getattr(c, "hasnans", False)]
        if columns:
            raise DataError(
                f"the {what} have texts, dates or missing values in {', '.join(columns)}: remove or encode these "
                "columns, as pandas.get_dummies does for texts"
            ) from error
        raise DataError(f"the {what} cannot be converted to a tensor ({error}): {remedy}") from error


def _stacked(values: Sequence[Any]) -> Tensor:
    inputs = [as_tensor(tensor) for tensor in values]
    forms = {
        ", ".join(
            f"{name} {list(p.shape)}{' of bytes' if p.dtype == torch.uint8 else ''}"
            for name, p in parts_of(tensor).items()
        )
        for tensor in inputs
    }
    if len(forms) > 1:
        one, other = sorted(forms)[:2]
        raise DataError(f"examples differ in shape or type, such as {one} and {other}: convert or pad in collate_fn")
    return torch.stack(inputs)


def as_labels(value: Any) -> Tensor:
    """Convert labels to a tensor: (n,) or (n, labels) int64, (n, targets) floats, or (n, height, width) for pixels.

    Floats are float32 or float64. Labels of pixels keep their integer type; an axis with a single channel is removed.
    """
    if isinstance(value, list | tuple):
        value = [np.array(label) if hasattr(label, "getbands") else label for label in value]  # PIL images
    if isinstance(value, list) and value and isinstance(value[0], Tensor | np.ndarray):
        value = torch.stack([torch.as_tensor(label) for label in value])
    remedy = "number the classes from 0, in the same way for all clients, or give all labels as one list of texts"
    labels = _dense(value, "labels", remedy)
    labels = labels.float() if labels.dtype in (torch.float16, torch.bfloat16) else labels
    if labels.ndim > 2:
        return labels.squeeze(1) if labels.ndim > 3 else labels
    if labels.is_floating_point():
        return labels[:, None] if labels.ndim == 1 else labels
    return (labels.squeeze(1) if labels.ndim == 2 and labels.shape[1] == 1 else labels).long()

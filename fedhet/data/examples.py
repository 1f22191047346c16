"""Classes for labelled examples, the data of a client, public datasets and data sets by name; transforms of images."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedhet.data.names import CLASSES, COLUMNS, LABEL_COLUMNS, Names, permuted, renumbering, shown
from fedhet.data.reading import LazyInputs, moved, single, spans
from fedhet.errors import DataError, nearest
from fedhet.tasks import Task
from fedhet.utils.files import expanded
from fedhet.utils.inputs import Inputs, as_bytes, from_parts, parts_of
from fedhet.utils.machine import brought

Indices = NDArray[np.int64]
Transform = Callable[[Tensor], Tensor]
Augment = Callable[[Tensor, torch.Generator], Tensor]

UNLABELLED = -1
"""Class of a training example without a label, for methods that train without labels."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Labelled examples: raw inputs (n, ...), in memory or read on demand (`[:]` reads all), and their labels.

    Labels are (n,) int64 classes, (n, labels) of 0 and 1 (multi-label), (n, targets) floats, (n, tokens) int64, or (n,
    h, w) integers for pixels. If `groups`, tensors of example indices, are given, a mini-batch has whole groups.
    """

    inputs: Tensor | LazyInputs
    labels: Tensor
    groups: tuple[Tensor, ...] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def labelled(self) -> Tensor:
        """The indices (m,) of the examples with a label; all but those of class `UNLABELLED`."""
        classes = self.labels.ndim == 1 and not self.labels.is_floating_point()
        chosen = self.labels != UNLABELLED if classes else torch.ones(len(self), dtype=torch.bool)
        return torch.nonzero(chosen)[:, 0].cpu()

    def at(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels at `rows` (indices or a slice); a user's collate function may reorder both."""
        if isinstance(self.inputs, LazyInputs):
            return self.inputs.pairs(rows)
        if isinstance(rows, slice):
            return self.inputs[rows], self.labels[rows]
        return self.inputs.index_select(0, rows), self.labels.index_select(0, rows)  # faster than inputs[rows]

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over pairs (inputs, labels) of `size` examples; a single last example joins the batch before it."""
        return map(self.at, spans(len(self), size))

    def subset(self, indices: Indices | NDArray[np.bool_] | Tensor) -> "Examples":
        """Return the examples at these indices, in this order, or of a mask (n,); examples in memory are copied."""
        chosen = torch.as_tensor(indices)
        inputs = self.inputs.subset(chosen) if isinstance(self.inputs, LazyInputs) else self.inputs[chosen]
        return Examples(inputs, self.labels[chosen])

    def to(self, device: torch.device) -> "Examples":
        """Return the examples with inputs and labels on a device."""
        return Examples(moved(self.inputs, device), moved(self.labels, device))


def digest(*content: object) -> str:
    """Return a hexadecimal hash of tensors (their values, dtype and shape) and other objects (their `str`)."""
    digested = hashlib.blake2b(digest_size=12)
    parts = ([*value.parts, *value.parts.values()] if isinstance(value, Inputs) else [value] for value in content)
    for part in chain.from_iterable(parts):
        if not isinstance(part, Tensor):
            digested.update(f"{part}\n".encode())
            continue
        digested.update(f"{part.dtype}{list(part.shape)}".encode())
        digested.update(as_bytes(part).numpy().data)
    return digested.hexdigest()


@dataclass(frozen=True, eq=False)
class PublicDataset:
    """The public dataset, which all clients have in the same order: raw inputs (n, ...) and optional labels.

    `names` has the names of its classes and columns, if known.
    """

    inputs: Tensor
    labels: Tensor | None = None
    names: Names = field(default_factory=dict, kw_only=True)

    @classmethod
    def of(cls, *given: Tensor) -> "PublicDataset":
        """Return the public dataset of inputs and labels, in float32 if it holds all values, so that digests agree."""
        exact = all(torch.equal(part, single(part)) for tensor in given for part in parts_of(tensor).values())
        return cls(*map(single, given)) if exact else cls(*given)

    def __len__(self) -> int:
        return len(self.inputs)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal hash of inputs and labels."""
        return digest(*(tensor for tensor in (self.inputs, self.labels) if tensor is not None))

    @cached_property
    def unlabelled(self) -> "PublicDataset":
        """The public dataset without its labels, or the object itself if it has none."""
        return self if self.labels is None else replace(self, labels=None)

    def to(self, device: torch.device) -> "PublicDataset":
        """Return the public dataset with inputs and labels on a device."""
        return PublicDataset(moved(self.inputs, device), None if self.labels is None else moved(self.labels, device))


P = TypeVar("P", Examples, PublicDataset)


@lru_cache(maxsize=4)
def resident(part: P, device: torch.device) -> P:
    """Return `part` (examples or the public dataset) on a device; the last four results are cached."""
    return part.to(device)


def relabelled(part: P, change: Callable[[Tensor], Tensor]) -> P:
    """Return `part` (examples or the public dataset) with labels `change(labels)`, or itself if no label changes."""
    labels = part.labels if part.labels is None else change(part.labels)
    if labels is part.labels:
        return part
    inputs = part.inputs
    if isinstance(inputs, LazyInputs):
        before = inputs.relabel or (lambda read: read)
        inputs = replace(inputs, relabel=lambda read: change(before(read)))
    return replace(part, inputs=inputs, labels=labels)


def in_order(part: P, kind: str, ours: Sequence[str], theirs: Sequence[str]) -> P:
    """Return `part` with its classes or columns (`kind`, with the names `ours`) in the order of the names `theirs`."""
    if kind == CLASSES:
        return relabelled(part, renumbering(ours, theirs))
    order = _places(ours, theirs)
    if kind == LABEL_COLUMNS:
        return relabelled(part, lambda labels: labels[:, order.to(labels.device)])
    return replace(part, inputs=_with_columns(part.inputs[:], kind, order))


def _places(ours: Sequence[str], theirs: Sequence[str]) -> Tensor:
    """Return the places in `ours` of the names `theirs`."""
    places = {name: place for place, name in enumerate(ours)}
    return torch.tensor([places[name] for name in theirs])


def _with_columns(inputs: Tensor, kind: str, order: Tensor) -> Tensor:
    """Return inputs whose columns `kind` are those at the places `order`, in this order."""
    tensors = parts_of(inputs, COLUMNS)
    tensors[kind] = tensors[kind][:, order.to(tensors[kind].device)]
    return from_parts(tensors, COLUMNS)


def _augmenting(augment: Augment, kind: str, ours: Sequence[str], theirs: Sequence[str]) -> Augment:
    """Return a user's function `augment`, which knows the columns in the order `ours`, for inputs in that of `theirs`.

    The columns are `kind` of the names in both lists.
    """
    back = _places(theirs, ours)
    forth = _places(ours, theirs)

    def augmented(inputs: Tensor, generator: torch.Generator) -> Tensor:
        return _with_columns(augment(_with_columns(inputs, kind, back), generator), kind, forth)

    return augmented


@dataclass(frozen=True, eq=False)
class ClientData:
    """A client's training, test and validation examples, the public dataset, and the common test set (`common`).

    `augment(inputs, generator)` returns a randomly changed copy of raw training inputs. `batch_size`, unless None,
    replaces the configured batch size. `dataset` is the configured data set of the examples, or None for a user's data,
    and `classes` the number of classes of all clients' examples together, 0 if it is unknown.
    All parts have the classes and columns `names`, if known; `note` says which were aligned.
    """

    train: Examples
    test: Examples
    public: PublicDataset | None = None
    common: Examples | None = None
    validation: Examples | None = None
    augment: Augment | None = None
    batch_size: int | None = None
    dataset: "DataSet | None" = None
    classes: int = 0
    names: Names = field(default_factory=dict)
    note: str = ""

    def to(self, device: torch.device) -> "ClientData":
        """Return the data with all examples on a device, except for the public dataset, which is not moved."""
        parts: dict[str, Any] = {name: part for name, part in vars(self).items() if isinstance(part, Examples)}
        return replace(self, **{name: part.to(device) for name, part in parts.items()})

    def relabelled(self, change: Callable[[Tensor], Tensor]) -> "ClientData":
        """Return the data with `change` applied to every tensor of labels."""
        parts: dict[str, Any] = {name: p for name, p in vars(self).items() if isinstance(p, Examples | PublicDataset)}
        return replace(self, **{name: relabelled(part, change) for name, part in parts.items()})

    def aligned(self, names: Names) -> "ClientData":
        """Return the data with classes and columns in the order of `names`, if these are the same names."""
        data = self
        for kind, ours in self.names.items():
            theirs = names.get(kind, ours)
            if permuted(ours, theirs):
                parts: dict[str, Any] = {n: p for n, p in vars(data).items() if isinstance(p, Examples | PublicDataset)}
                parts = {name: in_order(part, kind, ours, theirs) for name, part in parts.items()}
                note = f"{data.note}; its {kind} ({shown(ours)}) are put in the server's order: {shown(theirs)}"
                augment = data.augment
                if augment and kind.startswith(COLUMNS):
                    augment = _augmenting(augment, kind, ours, theirs)
                about: dict[str, Any] = {"names": {**data.names, kind: theirs}, "note": note.removeprefix("; ")}
                data = replace(data, **parts, **about, augment=augment)
        return data


class Owners(NamedTuple):
    """The owner (a patient or user) of each training and test example, as int64 numbers (n,); -1 is for no owner."""

    train: Indices
    test: Indices


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set: its training examples, its common test set, and its task, which determines loss and metric.

    Attributes:
        classes: number of outputs of a model: classes, labels or characters.
        input_shape: shape of one transformed example.
        transform: converts a batch of raw inputs (n, ...) to a model's input, each example separately.
        augment: returns random variants of raw images, of the same shape and dtype, given a generator.
        groups: owners of the examples, for the partition `natural`.
        together: owners whose examples the partition `iid` keeps together, such as patients.
        class_names: names of the classes by number, if known.
        files: digest of the names, sizes and times of its files; empty if files of others are read.
    """

    name: str
    train: Examples
    test: Examples
    classes: int
    task: Task
    input_shape: tuple[int, ...]
    transform: Transform
    augment: Augment | None = None
    groups: Owners | None = None
    together: Owners | None = None
    class_names: tuple[str, ...] = ()
    files: str = ""


class Normalise:
    """A transform that converts images to float32 and normalises each channel: `(images / scale - mean) / std`."""

    def __init__(self, scale: float, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)):
        # A scalar for one channel, because broadcasting costs more than the addition.
        shape = (-1, 1, 1) if len(mean) > 1 else ()
        self._factor = torch.tensor([1 / (scale * s) for s in std]).view(shape)
        self._offset = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).view(shape)

    def __call__(self, images: Tensor) -> Tensor:
        """Return images (n, channels, height, width) of any dtype as normalised float32, in a new tensor."""
        floats = images.to(torch.float32, copy=True)
        if self._factor.device != images.device:  # copying them for each batch would make a GPU wait
            self._factor, self._offset = self._factor.to(images.device), self._offset.to(images.device)
        return floats.mul_(self._factor).add_(self._offset)


def resized(images: Tensor, transform: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """Apply `transform` to images and resize the result to (n, channels, size, size), bilinearly with antialiasing."""
    return F.interpolate(transform(images), size=(size, size), mode="bilinear", antialias=True)


def crop_and_flip(images: Tensor, generator: torch.Generator, *, reflect: bool = True) -> Tensor:
    """Augment images (n, channels, height, width) as usual for CIFAR: pad by 4 pixels, randomly crop and flip.

    The padding is the reflected image, or zeros without `reflect`. The generator must be on the CPU.
    """
    n, channels, height, width = images.shape
    shifts = torch.randint(-4, 5, (2, n, 1), generator=generator)
    drawn = torch.cat([shifts, torch.randint(2, (1, n, 1), generator=generator)])
    down, right, flips = brought(drawn, images.device)
    rows, columns = (torch.arange(size, device=images.device) for size in (height, width))
    rows = rows + down
    columns = torch.where(flips.bool(), columns.flip(0), columns) + right
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    pixels = (_reflected(rows, height)[:, :, None] * width + _reflected(columns, width)[:, None, :]).view(n, 1, -1)
    cropped = images.flatten(2).gather(2, pixels.expand(-1, channels, -1)).view_as(images)
    return cropped if reflect else cropped * inside[:, None]


def flip_crop_brighten_blur(images: Tensor, generator: torch.Generator) -> Tensor:
    """Augment images (n, channels, height, width) uint8 as FedHARM does (Kastellos et al., 2024).

    Images are flipped horizontally and vertically, cropped and blurred, and their brightness changes by up to 20 %.
    Each flip and the blur (3 x 3, standard deviation of 0.1 to 1 pixel) affect half of the images, as the paper gives
    no probabilities. The generator must be on the CPU.
    """
    n = len(images)
    cropped = crop_and_flip(images, generator)
    upside_down = torch.randint(2, (n,), generator=generator)
    brightness = 0.8 + 0.4 * torch.rand(n, generator=generator)
    deviation = 0.1 + 0.9 * torch.rand(n, generator=generator)
    beside = (-0.5 / deviation.square()).exp() * torch.randint(2, (n,), generator=generator)
    drawn = torch.stack([upside_down, brightness, 1 / (1 + 2 * beside), beside / (1 + 2 * beside)])
    flips, factors, centre, side = brought(drawn, images.device).view(4, n, 1, 1, 1)
    floats = torch.where(flips.bool(), cropped.flip(2), cropped) * factors
    padded = F.pad(floats, (1, 1, 1, 1), mode="reflect")
    rows = side * (padded[:, :, :-2] + padded[:, :, 2:]) + centre * padded[:, :, 1:-1]
    blurred = side * (rows[..., :-2] + rows[..., 2:]) + centre * rows[..., 1:-1]
    return blurred.round().clamp(0, 255).to(images.dtype)


def _reflected(positions: Tensor, size: int) -> Tensor:
    """Map indices of pixels outside 0 to `size` - 1 to indices inside, by reflection at the first or last pixel."""
    return (size - 1) - ((size - 1) - positions.abs()).abs()


# ---- data sets by name

Loader = Callable[[Path | None], DataSet]
"""A function that loads a data set from a folder, or from its default place if the folder is None."""

LOADED: dict[tuple[str, Path | None, int], DataSet] = {}
"""Data sets that this process has loaded, by (name, folder, input size); they are copied to worker processes."""

_LOADERS: dict[str, Loader] = {}
_WITHOUT_EFFECT: dict[str, set[str]] = {}


def register_dataset(name: str, *, augments: bool = False, included: bool = False) -> Callable[[Loader], Loader]:
    """Return a decorator that registers a loader under `name`.

    `augments` states whether the data set has an augmentation, `included` whether an installed package contains it.
    """

    def register(loader: Loader) -> Loader:
        _LOADERS[name] = loader
        _WITHOUT_EFFECT[name] = {key for key, used in {"data": not included, "augment": augments}.items() if not used}
        return loader

    return register


def names() -> list[str]:
    """Return the names of the data sets, sorted."""
    return sorted(_LOADERS)


def keys_without_effect(name: str) -> set[str]:
    """Return the configuration keys among `data` and `augment` that have no effect on a data set; does not load it."""
    return _WITHOUT_EFFECT.get(name, {"augment"})


def load(name: str, folder: str | Path | None = None, *, input_size: int = 0) -> DataSet:
    """Load a registered data set by name; the same arguments return the same object.

    Without `folder`, missing files are downloaded to the user's cache folder. Images are resized to height and width
    `input_size`, unless that is 0. Raises a `DataError` for unknown names and missing or damaged files.
    """
    key = (name, expanded(folder) if folder else None, input_size)
    if key not in LOADED:
        if name not in _LOADERS:
            raise DataError(nearest("data set", name, _LOADERS))
        dataset = load(name, folder) if input_size else _LOADERS[name](key[1])
        if input_size:
            if len(dataset.input_shape) != 3:
                raise DataError(f"input-size = {input_size} is for images, not for {name}: leave it out")
            transform = partial(resized, transform=dataset.transform, size=input_size)
            shape = (dataset.input_shape[0], input_size, input_size)
            dataset = replace(dataset, input_shape=shape, transform=transform)
        LOADED[key] = dataset
    return LOADED[key]

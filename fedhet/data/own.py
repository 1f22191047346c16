"""Conversion of a user's data to `ClientData`.

Examples (for training, test, common test or validation) are a pair (inputs, labels) of tensors, arrays or lists, with
None for labels of training examples that have none; a mapping with columns by name; a torch `Dataset`, a Hugging Face
partition or another sequence of rows; or a `DataLoader`. Rows are read on demand (see `fedhet.data.reading`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data.dataloader import default_collate
from torch.utils.data.sampler import BatchSampler, RandomSampler, WeightedRandomSampler

from fedhet.data.examples import UNLABELLED, Augment, ClientData, Examples, PublicDataset, in_order
from fedhet.data.names import CLASSES, COLUMNS, Names, alike, merged, permuted, plain, shown, unlike
from fedhet.data.naming import check_index, named_labels, names_of
from fedhet.data.reading import (
    INPUTS,
    LABELS,
    Collate,
    LazyInputs,
    as_labels,
    as_tensor,
    check_finite,
    labels_of,
    pair_of,
)
from fedhet.errors import DataError, UserCodeError
from fedhet.utils.inputs import Inputs, for_each, parts_of

PARTS = ("train", "test", "public", "common", "validation")


def as_input(inputs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Convert a user's raw inputs for a model: divide bytes by 255, and cast floats to `dtype`, if given."""

    def scaled(part: Tensor) -> Tensor:
        part = part / 255 if part.dtype == torch.uint8 else part
        return part.to(dtype) if dtype and part.is_floating_point() else part

    return for_each(inputs, scaled)


def as_client_data(client: str, value: Any) -> ClientData:
    """Convert `value`, which a user's data function returned for the named client, to `ClientData`.

    It is a `ClientData`, a pair (train, test), or a mapping (see `fedhet.make_client_app`). Raises a `DataError` that
    names the client if the form of the data is unknown or a number is not finite.
    """
    given: Names | None = None
    classes = 0
    if isinstance(value, ClientData):
        given = value.names
        classes = value.classes
        value = {name: getattr(value, name) for name in (*PARTS, "augment")}
    elif isinstance(value, tuple | list) and len(value) == 2:
        value = {"train": value[0], "test": value[1]}
    try:
        names = value.keys() if isinstance(value, Mapping) else set()
        if not {"train", "test"} <= names <= {*PARTS, "augment"}:
            got = ", ".join(map(repr, names)) or ("None" if value is None else f"a {type(value).__name__}")
            raise DataError(
                "the data function must return (train, test), or a mapping with 'train', 'test' and any of 'public', "
                f"'common', 'validation' and 'augment' (see fedhet.make_client_app); it returned {got}"
            )
        present = [name for name in PARTS if name in ("train", "test") or value.get(name) is not None]
        parts = {name: _part(name, value[name], public=name == "public") for name in present}
        named = {name: names_of(value[name]) if given is None else given for name in present}
        common, note = aligned(parts, named)
        if "public" in parts:
            parts["public"] = replace(parts["public"], names=common)
        for name, part in parts.items():
            if isinstance(part.inputs, LazyInputs):
                part.inputs.part = f"client {client}: {name}"  # rows are read and checked later
        size = getattr(getattr(value["train"], "batch_sampler", None), "batch_size", None)  # of a DataLoader
        batch_size = size if isinstance(size, int) else None
        augment = _as_augment(value.get("augment"))
        about: dict[str, Any] = {"batch_size": batch_size, "classes": classes, "names": common, "note": note}
        return ClientData(**parts, augment=augment, **about)
    except DataError as error:
        raise type(error)(f"client {client}: {error}") from error


def aligned(parts: dict[str, Any], named: Mapping[str, Names]) -> tuple[Names, str]:
    """Align the parts of a client with the first one in place, by their names (`named`); return names and a note.

    Classes that only a later part has get the next numbers. The note says what was aligned, and
    which parts lack names that others have.
    """
    names: dict[str, tuple[str, ...]] = {}
    notes = []
    for part, listed in named.items():
        for kind, ours in listed.items():
            theirs = names.setdefault(kind, ours)
            if alike(kind, ours, theirs):
                names[kind] = merged(theirs, ours)
                continue
            if kind == CLASSES:
                names[kind] = theirs = (*theirs, *(name for name in ours if name not in theirs))
            elif not permuted(ours, theirs):
                raise DataError(f"{part}: {unlike(f'its {kind}', ours, theirs)}: give all parts the same {kind}")
            parts[part] = in_order(parts[part], kind, ours, theirs)
            notes.append(f"the {kind} of {part} ({shown(ours)}) are aligned by name: {shown(theirs)}")
    for kind, order in names.items():
        given = [part for part in parts if kind.startswith(COLUMNS) or _labelled(parts[part])]
        lacking = [part for part in given if plain(named[part].get(kind, ()))]
        if lacking and not plain(order):
            whose = " and ".join(lacking)
            notes.append(f"give names to the {kind} of {whose}, or check that their order is {shown(order)}")
    return names, "; ".join(notes)


def _labelled(part: Any) -> bool:
    return part.labels is not None and bool((part.labels != UNLABELLED).any())


def as_public_dataset(value: Any) -> PublicDataset | None:
    """Convert a user's public dataset to a `PublicDataset` in memory; return None if `value` is None.

    It is an array of inputs without labels, or has any form that this module accepts for examples. Raises a `DataError`
    for other forms and for numbers that are not finite.
    """
    if value is None:
        return None
    public: PublicDataset = _part("the public dataset", value, public=True)
    return public if isinstance(value, PublicDataset) else replace(public, names=names_of(value))


def _part(name: str, value: Any, *, public: bool) -> Any:
    try:
        part: Any = _public(value) if public else examples_of(value)
        if public and not len(part):
            raise DataError("it has no examples: add some, or leave it out")
        for kind, tensor in (("inputs", part.inputs), ("labels", part.labels)):
            if tensor is not None and not isinstance(tensor, LazyInputs):  # rows are checked when they are read
                columns = names_of(value).get(COLUMNS, ()) if kind == "inputs" else ()
                check_finite(tensor, kind, range(len(tensor)), columns)
                if any(each.requires_grad or each.is_inference() for each in parts_of(tensor).values()):
                    part = replace(part, **{kind: tensor.detach().clone()})  # data have no gradients
        return part
    except DataError as error:
        raise type(error)(f"{name}: {error}") from error


def _public(value: Any) -> PublicDataset:
    if isinstance(value, PublicDataset):
        return value
    if hasattr(value, "__array__") or (isinstance(value, Mapping) and not value.keys() & {*LABELS}):
        return PublicDataset.of(as_tensor(value))
    return PublicDataset.of(*examples_of(value).at(slice(None)))


def examples_of(value: Any) -> Examples:
    """Convert a user's examples; raise a `DataError` for unknown forms. That numbers are finite is not checked."""
    if isinstance(value, Examples):
        return value
    if isinstance(value, DataLoader):
        collate: Any = None if value.collate_fn is default_collate else value.collate_fn
        return _rows(value.dataset, collate, value)
    if hasattr(value, "to_numpy") or (hasattr(value, "column_names") and hasattr(value, "__array__")):  # of pyarrow
        raise DataError("inputs and labels are in one table: give a pair, such as (table[features], table[label])")
    if isinstance(value, Mapping):
        value = pair_of(value, whole=True)
    two = value if isinstance(value, tuple | list) and len(value) == 2 else ()
    if two and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in two):
        raise DataError("two pairs may be two examples or inputs and labels: give inputs and labels as tensors")
    if two and not isinstance(two[1], Mapping):
        check_index(*two)
        inputs = as_tensor(two[0])
        labels = torch.full((len(inputs),), UNLABELLED) if two[1] is None else as_labels(named_labels(two[1])[1])
        for part in parts_of(inputs).values():
            if len(part) != len(labels):
                raise DataError(f"the set has {len(part)} inputs but {len(labels)} labels: give one label per input")
        return Examples(inputs, labels)
    if isinstance(value, tuple | list) and value:
        inputs, labels = pair_of(value[0])
        shape = () if tuple in (type(inputs), type(labels)) else np.shape(labels)  # also of a PIL image
        if shape and len(shape) < np.ndim(inputs) and np.shape(inputs)[0] == shape[0] > 1:
            raise DataError(
                f"the pairs in the list, with {shape[0]} inputs and labels each, may be batches or examples: give "
                "one pair (inputs, labels), joined by torch.cat for batches or by torch.stack for examples"
            )
    return _rows(value, None)


def _sampled(loader: DataLoader[Any]) -> Tensor:
    """Return the sorted indices of the examples that a `DataLoader` draws; raises a `DataError` if epochs differ."""
    if type(loader).__iter__ is not DataLoader.__iter__ or loader.batch_sampler is None:
        raise DataError(
            "a DataLoader with its own __iter__ or batch_size = None has unknown examples: give the dataset"
        )
    sampler: Any = loader.batch_sampler
    whole, plain = len(loader.dataset), type(sampler) is BatchSampler  # type: ignore[arg-type]
    sampler = sampler.sampler if plain else sampler
    draws = (sampler if plain else chain.from_iterable(sampler) for _ in range(2))
    rows, others = (sorted(map(int, islice(draw, whole + 1))) for draw in draws)
    random = isinstance(sampler, RandomSampler | WeightedRandomSampler) and len(rows) < whole
    if getattr(sampler, "replacement", False) or random or rows != others or len(set(rows)) < len(rows):
        raise DataError(
            f"the sampler {type(sampler).__name__} repeats rows or draws different rows in each epoch: give a "
            "torch.utils.data.Subset, and class weights as fedhet.Task(class_weights=...)"
        )
    return torch.tensor(rows, dtype=torch.int64)


def _rows(value: Any, collate: Collate | None, loader: DataLoader[Any] | None = None) -> Examples:
    if isinstance(value, IterableDataset | str) or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        kind = "None" if value is None else f"a {type(value).__name__}"
        raise DataError(
            f"rows of {kind} cannot be read by index: give data as a pair (inputs, labels), a torch "
            f"Dataset with a length, or a mapping with the columns {INPUTS[0]} and {LABELS[0]}"
        )
    rows = torch.arange(len(value)) if loader is None else _sampled(loader)
    subset = value
    while isinstance(subset, Subset):
        if torch.as_tensor(subset.indices[:1]).dtype == torch.bool:
            raise DataError("the indices of a Subset are a mask of booleans: give row numbers (mask.nonzero()[:, 0])")
        subset = subset.dataset
    if collate is None and (pair := _in_memory(value)) is not None:
        return pair if len(rows) == len(pair) else pair.subset(rows)
    if not len(rows):
        return Examples(torch.empty(0), torch.empty(0).long())
    return Examples(LazyInputs(value, collate, rows), labels_of(value, collate, rows))


def _in_memory(value: Any) -> Examples | None:
    if type(value) is Subset and (whole := _in_memory(value.dataset)) is not None:
        return whole.subset(torch.as_tensor(value.indices, dtype=torch.int64))
    if type(value) is TensorDataset and len(value.tensors) == 2:
        return Examples(as_tensor(value.tensors[0]), as_labels(value.tensors[1]))
    return None


def _as_augment(augment: Any) -> Augment | None:
    if augment is None:
        return None
    taken, _ = open_parameters(augment.forward if isinstance(augment, nn.Module) else augment)
    seeded = any(parameter.name == "generator" for parameter in taken[1:])

    def augmented(inputs: Tensor, generator: torch.Generator) -> Tensor:
        inputs = inputs.clone()  # which the function may change in place, but the user's data must stay
        try:
            with torch.no_grad():  # which is restored if the function changes it
                batch: Any = augment(inputs, generator=generator) if seeded else augment(inputs)
        except (Exception, SystemExit) as error:
            raise UserCodeError.of(error, "the augment function") from error
        whole = isinstance(batch, Tensor | Inputs) and batch.shape[:1] == inputs.shape[:1]
        if not whole or (batch.dtype == torch.uint8) != (inputs.dtype == torch.uint8):  # bytes are scaled afterwards
            got = f"{batch.dtype} of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else "no tensor"
            raise DataError(
                f"the augment function returned {got} for a batch of {inputs.dtype} of shape {tuple(inputs.shape)}: it "
                f"must return {len(inputs)} inputs, as bytes (torch.uint8) if it gets bytes, and as floats otherwise"
            )
        return batch

    return augmented


def open_parameters(function: Callable[..., Any]) -> tuple[list[Parameter], list[Parameter]]:
    """Return two lists: parameters of a function that no `functools.partial` sets, and the required ones among them."""
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):
        return [], []  # the parameters of some built-in functions are unknown
    bound = function.keywords if isinstance(function, partial) else {}
    taken = [parameter for parameter in parameters if parameter.name not in bound]
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return taken, [each for each in taken if each.default is Parameter.empty and each.kind not in variadic]

"""A user's own data, in whatever usual form, as `ClientData`.

A part (training, test, common, validation) is a pair (inputs, labels) of tensors, arrays or lists; columns by name; a
torch `Dataset`, a Hugging Face partition or anything else with rows; or a `DataLoader` of one. What has rows is read
row by row when they are needed (`fedhet.data.reading`), so random transforms stay random and images may be many.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data.dataloader import default_collate

from fedhet.data.examples import Augment, ClientData, Examples, PublicDataset
from fedhet.data.reading import INPUTS, LABELS, LazyInputs, as_labels, as_tensor, labels_of, not_finite, pair_of
from fedhet.errors import DataError

PARTS = ("train", "test", "public", "common", "validation")


def as_input(inputs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Convert a user's raw inputs for a model: bytes scaled to [0, 1], floats in its precision, all else as it is."""
    if inputs.dtype == torch.uint8:
        inputs = inputs / 255
    return inputs.to(dtype) if dtype and inputs.is_floating_point() else inputs


def as_client_data(client: str, value: Any) -> ClientData:
    """Convert what a user's data function returned to `ClientData`.

    A `DataError` names the client and the part that is in no known form or holds numbers that are not finite.
    """
    try:
        if not isinstance(value, ClientData):
            return _client_data(value)
        parts = {name: part for name in PARTS if (part := getattr(value, name)) is not None}
        return replace(value, **{name: _part(name, part, public=name == "public") for name, part in parts.items()})
    except DataError as error:
        raise DataError(f"client {client}: {error}") from error


def as_public_dataset(value: Any) -> PublicDataset | None:
    """A public dataset in any usual form, inputs alone or whatever a part may be, read whole; None is none.

    A `DataError` refuses other forms, and numbers that are not finite.
    """
    return None if value is None else _part("a public dataset", value, public=True)


def _client_data(value: Any) -> ClientData:
    if isinstance(value, tuple | list) and 2 <= len(value) <= len(PARTS):
        value = dict(zip(PARTS, value, strict=False))
    names = value.keys() if isinstance(value, Mapping) else set()
    if not {"train", "test"} <= names <= {*PARTS, "augment"}:
        got = ", ".join(map(repr, names)) or f"an object of type {type(value).__name__}"
        raise DataError(
            "the data function must return (train, test), or a mapping of 'train', 'test' and, where there are any, "
            f"'public', 'common', 'validation' and 'augment'; it returned {got}"
        )
    present = [name for name in PARTS if name in ("train", "test") or value.get(name) is not None]
    parts = {name: _part(name, value[name], public=name == "public") for name in present}
    batch_size = value["train"].batch_size if isinstance(value["train"], DataLoader) else None
    return ClientData(**parts, augment=_as_augment(value.get("augment")), batch_size=batch_size)


def _part(name: str, value: Any, *, public: bool) -> Any:
    """The part of this name as `Examples`, or as a `PublicDataset`, whose numbers in memory are finite."""
    try:
        part = _public(value) if public else _examples(value)
        for kind, tensor in (("inputs", part.inputs), ("labels", part.labels)):
            if isinstance(tensor, LazyInputs):  # which checks rows when they are read
                tensor.part = tensor.part or name
            elif tensor is not None and (odd := not_finite(tensor)) is not None:
                raise DataError(f"has {odd[1]} in the {kind} of row {odd[0]}: leave such rows out, or fill them in")
        return part
    except DataError as error:
        raise DataError(f"{name} {error}") from error


def _public(value: Any) -> PublicDataset:
    if isinstance(value, PublicDataset):
        return value
    if hasattr(value, "__array__"):
        return PublicDataset(as_tensor(value))
    if isinstance(value, str) or (isinstance(value, tuple | list) and len(value) != 2):
        raise DataError(f"must be a tensor of inputs or a pair (inputs, labels), not a {type(value).__name__}")
    examples = _examples(value)
    return PublicDataset(examples.inputs[:], examples.labels)


def _examples(value: Any) -> Examples:
    if isinstance(value, Examples):
        return value
    if isinstance(value, DataLoader):
        collate: Any = None if value.collate_fn is default_collate else value.collate_fn
        return _rows(value.dataset, collate)
    if isinstance(value, Mapping):
        value = pair_of(value)
    if isinstance(value, tuple | list) and len(value) == 2:
        inputs, labels = as_tensor(value[0]), as_labels(value[1])
        if len(inputs) != len(labels):
            raise DataError(f"has {len(inputs)} inputs and {len(labels)} labels")
        return Examples(inputs, labels)
    return _rows(value, None)


def _rows(value: Any, collate: Callable[[Sequence[Any]], Any] | None) -> Examples:
    """Examples of something with rows."""
    if isinstance(value, IterableDataset) or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        raise DataError(
            f"is of type {type(value).__name__}, whose rows cannot be asked for by number: give a pair (inputs, "
            f"labels), a torch Dataset with a length, or columns of which one is {'/'.join(INPUTS[:2])} and one "
            f"{LABELS[0]}"
        )
    if collate is None and (pair := _in_memory(value)) is not None:
        return pair
    if not len(value):
        return Examples(torch.empty(0), torch.empty(0).long())
    return Examples(LazyInputs(value, collate, torch.arange(len(value))), labels_of(value, collate))


def _in_memory(value: Any) -> Examples | None:
    """The examples of a dataset that is two tensors, or a part of such a one."""
    if isinstance(value, Subset) and (whole := _in_memory(value.dataset)) is not None:
        return whole.subset(torch.as_tensor(value.indices, dtype=torch.int64))
    if isinstance(value, TensorDataset) and len(value.tensors) == 2:
        return Examples(as_tensor(value.tensors[0]), as_labels(value.tensors[1]))
    return None


def _as_augment(augment: Any) -> Augment | None:
    """A function of a batch, or of a batch and a generator, as the latter."""
    if augment is None:
        return None
    if not callable(augment):
        raise DataError("augment must be a function of a batch of inputs")
    try:
        kinds = [parameter.kind for parameter in signature(augment).parameters.values()]
    except ValueError:
        kinds = []
    if len(kinds) - kinds.count(Parameter.VAR_KEYWORD) == 2 and Parameter.VAR_POSITIONAL not in kinds:
        return augment
    return lambda inputs, generator: augment(inputs)

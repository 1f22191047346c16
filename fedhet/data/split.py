"""Random draws of public datasets, test sets and validation examples, each determined by a seed."""

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedhet.data.examples import ClientData, DataSet, Examples, Indices, Owners
from fedhet.data.partitions import proportional_sample
from fedhet.data.reading import LazyInputs, single
from fedhet.errors import DataError
from fedhet.utils.randomness import numpy_generator


def hold_out(dataset: DataSet, size: int, seed: int) -> tuple[Indices, Indices]:
    """Draw `size` training examples for a public dataset; return their indices and the remaining indices.

    The draw is stratified by class. If examples have owners, such as patients, it takes the examples of random owners,
    and the remaining indices are of other owners only. Raises a `DataError` if no example remains for the clients.
    """
    n = len(dataset.train)
    if not 0 <= size < n:
        raise DataError(f"public-samples = {size} must be less than the {n} training examples of {dataset.name}")
    rng = numpy_generator(seed, "hold-out")
    if not size or dataset.together is None:
        public = rng.permutation(proportional_sample(dataset.train.labels, size, rng))
        return public, np.setdiff1d(np.arange(n), public)
    owners = dataset.together.train
    public = rng.permutation(_owner_by_owner(owners, rng)[:size])
    rest = np.flatnonzero(~np.isin(owners, owners[public]))
    if not len(rest):
        owned = len(np.unique(owners))
        raise DataError(
            f"public-samples = {size} leaves no data for clients, since all {owned} owners (patients) of "
            f"{dataset.name} become public: lower public-samples"
        )
    return public, rest


def _owner_by_owner(owners: Indices, rng: np.random.Generator) -> Indices:
    return np.argsort(rng.permutation(owners.max() + 1)[owners], kind="stable")


D = TypeVar("D", DataSet, ClientData)


def with_drawn_test_set(data: D, seed: int, share: float = 0.0, *, client: str = "") -> D:
    """Return a data set, or the data of the client `client`, divided anew into training and test examples by `seed`.

    The number of test examples is unchanged or, if `share` is not 0, this fraction of all examples. They are stratified
    by class or, if the data set has owners such as patients, all examples of random owners. Raises a `DataError` if the
    data set fixes each owner's test examples, or if inputs are not in memory or differ in shape or dtype.
    """
    if not len(data.test):
        return data
    both_kinds = {name: getattr(data, name, None) for name in ("groups", "together")}
    owned: dict[str, Owners] = {name: owners for name, owners in both_kinds.items() if owners is not None}
    if isinstance(data, DataSet) and [*owned] == ["groups"]:
        raise DataError(f"{data.name} has natural clients with fixed test examples: remove test-split = drawn")
    inputs = [part.inputs for part in (data.train, data.test) if not isinstance(part.inputs, LazyInputs)]
    if len(inputs) < 2 or len({(single(each[:1]).dtype, each.shape[1:]) for each in inputs}) > 1:
        raise DataError(
            "test-split = drawn needs inputs in memory, of one shape and dtype: give tensors or arrays, or draw the "
            "test part in the data function, with the seed client.split_seed"
        )
    both = Examples(torch.cat(inputs), torch.cat([data.train.labels, data.test.labels]))
    rng = numpy_generator(seed, "test part", client) if client else numpy_generator(seed, "test set")
    of_both = {name: np.concatenate(owners) for name, owners in owned.items()}
    train, test = _drawn(both.labels, _size(both.labels, share) or len(data.test), rng, of_both.get("together"))
    drawn: dict[str, Any] = {name: Owners(owners[train], owners[test]) for name, owners in of_both.items()}
    return replace(data, train=both.subset(train), test=both.subset(test), **drawn)


def _size(labels: Tensor, share: float) -> int:
    return min(max(1, round(share * len(labels))), len(labels) - 1) if share else 0


def _drawn(labels: Tensor, size: int, rng: np.random.Generator, owners: Indices | None) -> tuple[Indices, Indices]:
    """Draw `size` examples, stratified by label; return the sorted indices of the others and of the drawn ones.

    If `owners` has the owner of each example, all examples of random owners are drawn, until there are at least `size`.
    """
    if owners is None:
        drawn = np.isin(np.arange(len(labels)), proportional_sample(labels, size, rng))
    else:
        drawn = np.isin(owners, owners[_owner_by_owner(owners, rng)[:size]])
    return np.flatnonzero(~drawn), np.flatnonzero(drawn)


def with_validation(
    data: ClientData, share: float, seed: int, client: str, *, owners: Indices | None = None
) -> ClientData:
    """Return a client's data with a fraction `share` of its training examples, at least one, held out for validation.

    The draw depends on `seed` and the name `client`. With `owners` (n,), the owner of each example, it consists of all
    examples of some owners. Data with validation examples, or with a single example or owner, are returned unchanged.
    """
    if not share or len(data.train) < 2 or data.validation is not None:
        return data
    rng, classes = numpy_generator(seed, "validation", client), data.train.labels
    if classes.ndim == 1:
        # If there are fewer examples than classes, chance decides which classes get one, not their numbers.
        known, numbers = np.unique(classes.cpu().numpy(), return_inverse=True)
        classes = torch.from_numpy(rng.permutation(len(known))[numbers])
    rest, chosen = _drawn(classes, _size(classes, share), rng, owners)
    if not len(rest):
        return data
    return replace(data, train=data.train.subset(rest), validation=data.train.subset(chosen))

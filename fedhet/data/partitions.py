"""Partitions of a data set among clients, and random draws of public datasets, test sets and validation examples.

A partition assigns training and test examples to clients in the same way. Each draw is determined by a seed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhet.data.examples import ClientData, DataSet, Examples, Indices, Owners
from fedhet.data.reading import LazyInputs, single
from fedhet.errors import DataError, nearest
from fedhet.utils.randomness import numpy_generator

DIRICHLET_TRIES = 200
DIRICHLET_LEAST = 10  # smallest number of training examples of a client in a Dirichlet partition, as in FedMA's code


class Part(NamedTuple):
    """One client's examples, as ascending indices into the data set's training and test examples."""

    train: Indices
    test: Indices


Dealt = list[list[Indices]]
"""The examples assigned to clients: a list for training and one for test, with an index array for each client."""


@dataclass(frozen=True, eq=False)
class Job:
    """The input of a partition function: a data set, arguments of `partition`, and a random generator.

    `examples` are the indices of the training and test examples to assign to `clients` clients. `classes_per_client` is
    for the partition `classes`, the concentration `alpha` for `dirichlet`.
    """

    dataset: DataSet
    examples: tuple[Indices, Indices]
    clients: int
    classes_per_client: int
    alpha: float
    rng: np.random.Generator

    def labels(self) -> list[Indices]:
        """Return the classes (n,) of training and of test examples; raises a `DataError` unless each has one class."""
        labels = self.dataset.train.labels
        if labels.ndim != 1 or (labels < 0).any():
            raise DataError(
                f"{self.dataset.name} has examples without exactly one class each: set partition to iid or natural"
            )
        parts = zip((self.dataset.train, self.dataset.test), self.examples, strict=True)
        return [part.labels.numpy()[indices] for part, indices in parts]

    def class_sizes(self) -> list[Indices]:
        """Return the number of examples of each class, (classes,), for training and for test."""
        return [np.bincount(labels, minlength=self.dataset.classes) for labels in self.labels()]

    def by_owner(self, owners: Owners) -> list[dict[int, Indices]]:
        """Return dicts for training and test: indices of examples by number of their owner, such as a patient."""
        parts = []
        for indices, owner in zip(self.examples, owners, strict=True):
            numbers, starts = np.unique(np.sort(owner[indices]), return_index=True)
            examples = np.split(indices[np.argsort(owner[indices], kind="stable")], starts[1:])
            parts.append(dict(zip(numbers.tolist(), examples, strict=True)))
        return parts

    def deal(self, counts: Iterable[Indices]) -> Dealt:
        """Draw each client's examples; `counts` are the numbers (clients, classes) of training and of test examples."""
        dealt = []
        for indices, labels, numbers in zip(self.examples, self.labels(), counts, strict=True):
            classes = [
                np.split(self.rng.permutation(indices[labels == label]), np.cumsum(of_class))[:-1]
                for label, of_class in enumerate(numbers.T)
            ]
            dealt.append([np.concatenate(pieces) for pieces in zip(*classes, strict=True)])
        return dealt


def partitions() -> list[str]:
    """Return the names of the partitions, sorted."""
    return sorted(_PARTITIONS)


def partition(
    dataset: DataSet,
    name: str,
    *,
    clients: int,
    seed: int,
    classes_per_client: int = 2,
    alpha: float = 0.5,
    samples_per_client: int = 0,
    halved_clients: float = 0.0,
    test_share: float = 0.0,
    available: Indices | None = None,
) -> list[Part]:
    """Assign the examples of a data set to clients by the partition `name`; no example belongs to two clients.

    `classes_per_client` is for the partition `classes`, and the concentration `alpha` for `dirichlet`. A client has at
    most `samples_per_client` training examples (0: no limit), stratified by class. With this limit, `test_share` is
    the fraction of test examples among a client's examples (0: keep all test examples). `halved_clients` is the
    fraction of clients that lose half of their training examples. `available` are the indices of the training examples
    to assign, by default all. Raises a `DataError` if a client gets no training or test examples.
    """
    if name not in _PARTITIONS:
        raise DataError(nearest("partition", name, _PARTITIONS))
    examples = (np.arange(len(dataset.train)) if available is None else available, np.arange(len(dataset.test)))
    job = Job(dataset, examples, clients, classes_per_client, alpha, numpy_generator(seed, "partition"))
    train, test = _PARTITIONS[name](job)
    for kind, parts, all_of_them in zip(("training", "test"), (train, test), examples, strict=True):
        if empty := [client for client, part in enumerate(parts) if not len(part)]:
            raise DataError(
                f"partition {name!r} leaves client {empty[0]} of {clients} without any of {dataset.name}'s "
                f"{len(all_of_them)} {kind} examples: use fewer clients"
            )
    if samples_per_client:
        rng = numpy_generator(seed, "samples-per-client")
        train = [_sampled(part, dataset.train.labels, samples_per_client, rng) for part in train]
        if test_share:
            sizes = [round(len(part) * test_share / (1 - test_share)) for part in train]
            pairs = zip(test, sizes, strict=True)
            test = [_sampled(part, dataset.test.labels, max(1, size), rng) for part, size in pairs]
    if halved_clients:  # the clients of a smaller fraction are among those of a larger one
        rng = numpy_generator(seed, "halved clients")
        for client in rng.permutation(clients)[: round(halved_clients * clients)]:
            part = train[client]
            train[client] = _sampled(part, dataset.train.labels, max(1, len(part) // 2), rng)
    return [Part(np.sort(mine), np.sort(tested)) for mine, tested in zip(train, test, strict=True)]


def _sampled(part: Indices, labels: Tensor, size: int, rng: np.random.Generator) -> Indices:
    return part[proportional_sample(labels[part], size, rng)]


def proportional_sample(labels: Tensor, size: int, rng: np.random.Generator) -> Indices:
    """Return random indices (min(n, size),) into labels (n,), stratified by class unless labels have more axes."""
    order = rng.permutation(len(labels))
    if labels.ndim == 1:
        # Spread each class evenly over (0, 1); the first `size` of all together then contain each class's share.
        classes = labels.cpu().numpy()
        by_class = order[np.argsort(classes[order], kind="stable")]
        counts = np.unique(classes, return_counts=True)[1]
        places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        order = by_class[np.argsort(places, kind="stable")]
    return order[:size]


def iid(job: Job) -> Dealt:
    """Shuffle the examples in `job` and split them evenly; examples of one owner, such as a patient, stay together."""
    if job.dataset.together is not None:
        return [_evenly(job, list(owned.values())) for owned in job.by_owner(job.dataset.together)]
    return [np.array_split(job.rng.permutation(indices), job.clients) for indices in job.examples]


def _evenly(job: Job, units: list[Indices]) -> list[Indices]:
    """Assign arrays of indices (`units`) to clients: the largest first, each to the client with the fewest examples."""
    shares: list[list[int]] = [[] for _ in range(job.clients)]
    for unit in sorted((units[place] for place in job.rng.permutation(len(units))), key=len, reverse=True):
        min(shares, key=len).extend(unit.tolist())
    return [np.array(share, dtype=np.int64) for share in shares]


def by_classes(job: Job) -> Dealt:
    """Assign to each client in `job` examples of k classes (`classes_per_client`), the same in training and test.

    Clients choose in turn the classes that the fewest clients have chosen, with ties at random.
    """
    k = job.classes_per_client
    classes = job.dataset.classes
    if not 1 <= k <= classes:
        raise DataError(f"classes-per-client = {k}: must be from 1 to {classes}, the classes of {job.dataset.name}")
    holds = np.zeros((job.clients, classes), dtype=bool)
    for client in range(job.clients):
        holds[client, np.lexsort((job.rng.random(classes), holds.sum(0)))[:k]] = True
    return job.deal([_even_counts(holds, sizes, job.rng) for sizes in job.class_sizes()])


def _even_counts(holds: NDArray[np.bool_], sizes: Indices, rng: np.random.Generator) -> Indices:
    """Split the `sizes[k]` examples of each class k evenly among the clients for which `holds[client, k]` is True.

    Return their numbers (clients, classes). A remainder goes to clients with few examples; `rng` breaks ties.
    """
    counts = np.zeros(holds.shape, dtype=np.int64)
    for label, size in enumerate(sizes):
        holders = np.flatnonzero(holds[:, label])
        if len(holders):
            poorest_first = holders[np.lexsort((rng.random(len(holders)), counts[holders].sum(1)))]
            counts[poorest_first, label] = size // len(holders) + (np.arange(len(holders)) < size % len(holders))
    return counts


def dirichlet(job: Job) -> Dealt:
    """Divide each class in `job` among clients in proportions p ~ Dir(alpha), the same in training and test.

    As in the code of FedMA's authors, a client that has its equal share of the examples receives no further classes.
    The draw is repeated up to `DIRICHLET_TRIES` times, until each client has `DIRICHLET_LEAST` training examples.
    """
    sizes = job.class_sizes()
    fair_share = len(job.examples[0]) / job.clients
    for _ in range(DIRICHLET_TRIES if fair_share >= DIRICHLET_LEAST else 0):
        counts = np.zeros((2, job.clients, job.dataset.classes), dtype=np.int64)
        for label in range(job.dataset.classes):
            drawn = job.rng.dirichlet(np.full(job.clients, job.alpha)) * (counts[0].sum(1) < fair_share)
            if not drawn.sum() > 0:
                break  # with a tiny alpha, one client draws all of a class, and that client is full
            counts[:, :, label] = [_rounded(drawn / drawn.sum(), of_class[label]) for of_class in sizes]
        else:
            if counts[0].sum(1).min() >= DIRICHLET_LEAST and counts[1].sum(1).min() >= 1:
                return job.deal(counts)
    n_train, n_test = map(len, job.examples)
    raise DataError(
        f"no Dirichlet partition with alpha {job.alpha:g} gives each of {job.clients} clients at least "
        f"{DIRICHLET_LEAST} of {n_train} training and 1 of {n_test} test examples: use a larger alpha or fewer clients"
    )


def _rounded(shares: NDArray[np.float64], size: int) -> Indices:
    """Divide `size` into integers (clients,) in proportion to `shares` (clients,), which sum to 1."""
    ends: Indices = np.rint(np.minimum(np.cumsum(shares), 1) * size).astype(np.int64)
    return np.diff(ends, prepend=np.int64(0))


def natural(job: Job) -> Dealt:
    """Assign the examples of one owner, such as a user, to each client in `job`; owners are drawn at random."""
    groups = job.dataset.groups
    train, test = job.by_owner(groups) if groups is not None else ({}, {})
    owners = np.array(sorted(owner for owner in train.keys() & test.keys() if owner >= 0))
    if not len(owners):
        raise DataError(
            f"{job.dataset.name} has no natural clients, since it does not say who wrote an example: set partition to "
            "iid, classes or dirichlet"
        )
    if job.clients > len(owners):
        raise DataError(f"{job.dataset.name} has {len(owners)} natural clients, not {job.clients}: set fewer clients")
    chosen = np.sort(job.rng.choice(owners, job.clients, replace=False)).tolist()
    return [[part[owner] for owner in chosen] for part in (train, test)]


_PARTITIONS: dict[str, Callable[[Job], Dealt]] = {
    "iid": iid,
    "classes": by_classes,
    "dirichlet": dirichlet,
    "natural": natural,
}


def hold_out(dataset: DataSet, size: int, seed: int) -> tuple[Indices, Indices]:
    """Draw `size` training examples for a public dataset; return their indices and the remaining indices.

    The draw is stratified by class. If examples have owners, such as patients, it takes the examples of random owners,
    and the remaining indices are of other owners only. Raises a `DataError` if no example remains for the clients.
    """
    n = len(dataset.train)
    if not 0 <= size < n:
        raise DataError(
            f"public-samples = {size} must be less than the {n} training examples of {dataset.name}: set a smaller "
            "number or, for a method without a public dataset, public-samples = 0"
        )
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


def with_drawn_test_set(data: D, seed: int, share: float = 0.0, *, client: str = "", all_labelled: bool = True) -> D:
    """Return a data set, or the data of the client `client`, divided anew into training and test examples by `seed`.

    The number of test examples is unchanged or, if `share` is not 0, this fraction of the examples with a label, of
    which they are drawn. They are stratified by class or, if the data set has owners such as patients, all examples of
    random owners. Raises a `DataError` if the data set fixes each owner's test examples, or if inputs are not in memory
    or differ in shape or dtype. Unless `all_labelled`, examples of class `UNLABELLED` have no label.
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
    rows = _candidates(both, all_labelled)
    train, test = _drawn(both.labels, rows, size_of_part(rows, share) or len(data.test), rng, of_both.get("together"))
    drawn: dict[str, Any] = {name: Owners(owners[train], owners[test]) for name, owners in of_both.items()}
    return replace(data, train=both.subset(train), test=both.subset(test), **drawn)


def _candidates(examples: Examples, all_labelled: bool) -> Indices:
    return np.arange(len(examples)) if all_labelled else examples.labelled.numpy()


def size_of_part(rows: Indices, share: float) -> int:
    """Return the number of examples in a part with a `share` of `rows`: at least one in and one outside; 0 for 0."""
    return min(max(1, round(share * len(rows))), len(rows) - 1) if share else 0


def _drawn(
    labels: Tensor, rows: Indices, size: int, rng: np.random.Generator, owners: Indices | None
) -> tuple[Indices, Indices]:
    """Draw `size` of the examples `rows`, stratified by label; return the sorted indices of the others and of these.

    If `owners` has the owner of each example, all of `rows` of random owners are drawn, until there are at least
    `size`, and the others have no example of these owners.
    """
    if owners is None:
        drawn = rows[proportional_sample(labels[torch.from_numpy(rows)], size, rng)]
        others = np.setdiff1d(np.arange(len(labels)), drawn)
    else:
        client_of = owners[rows]
        chosen = client_of[_owner_by_owner(client_of, rng)[:size]]
        drawn = rows[np.isin(client_of, chosen)]
        others = np.flatnonzero(~np.isin(owners, chosen))
    return others, np.sort(drawn)


def with_validation(
    data: ClientData,
    share: float,
    seed: int,
    client: str,
    *,
    owners: Indices | None = None,
    all_labelled: bool = True,
) -> ClientData:
    """Return a client's data with a fraction `share` of its training examples, at least one, held out for validation.

    The fraction is of the examples with a label, of which they are drawn by `seed` and the name `client`. With `owners`
    (n,), the owner of each example, they are all examples of some owners. Data with validation examples, or with a
    single labelled example or owner, are returned unchanged. Unless `all_labelled`, examples of class `UNLABELLED` have
    no label.
    """
    rows = _candidates(data.train, all_labelled)
    if not share or len(rows) < 2 or data.validation is not None:
        return data
    rng = numpy_generator(seed, "validation", client)
    classes = data.train.labels
    if classes.ndim == 1:
        # If there are fewer examples than classes, chance decides which classes get one, not their numbers.
        distinct, numbers = np.unique(classes.cpu().numpy(), return_inverse=True)
        classes = torch.from_numpy(rng.permutation(len(distinct))[numbers])
    rest, chosen = _drawn(classes, rows, size_of_part(rows, share), rng, owners)
    if not len(rest):
        return data
    return replace(data, train=data.train.subset(rest), validation=data.train.subset(chosen))

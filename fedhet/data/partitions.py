"""Partitions: functions that assign a data set's training and test examples to clients, both in the same way."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedhet.data.examples import DataSet, Indices, Owners
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
        """Return the classes (n,) of training and of test examples; raises a `DataError` for multi-label data."""
        if self.dataset.train.labels.ndim != 1:
            raise DataError(f"{self.dataset.name} has several labels per example: set partition to iid or natural")
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
    shares: list[list[Indices]] = [[np.empty(0, np.int64)] for _ in range(job.clients)]
    sizes = np.zeros(job.clients, dtype=np.int64)
    for unit in sorted((units[place] for place in job.rng.permutation(len(units))), key=len, reverse=True):
        poorest = int(sizes.argmin())
        shares[poorest].append(unit)
        sizes[poorest] += len(unit)
    return [np.concatenate(share) for share in shares]


def by_classes(job: Job) -> Dealt:
    """Assign to each client in `job` examples of k classes (`classes_per_client`), the same in training and test.

    Clients choose in turn the classes that the fewest clients have chosen, with ties at random.
    """
    k, classes = job.classes_per_client, job.dataset.classes
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

"""Who gets which examples: partitions by name, each seeded, each for training and test examples alike.

A partitioner shares out the training and the test examples by one rule, so that a client is tested on what it was
trained for. It gives every client at least one of both or says at once why that cannot be.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedhet.data.examples import DataSet, Indices
from fedhet.errors import DataError, nearest
from fedhet.randomness import numpy_generator

DIRICHLET_TRIES = 200


class Part(NamedTuple):
    """One client's examples, as ascending indices into the data set's training and test examples."""

    train: Indices
    test: Indices


@dataclass(frozen=True, eq=False)
class Job:
    """The arguments of a partitioner.

    Attributes:
        dataset: The data set.
        train: Indices of the training examples to share out.
        test: Indices of the test examples to share out.
        clients: Number of clients.
        classes_per_client: For `classes`.
        alpha: For `dirichlet`.
        min_size: For `dirichlet`: the fewest training examples of a client.
        rng: The partition's random stream.
    """

    dataset: DataSet
    train: Indices
    test: Indices
    clients: int
    classes_per_client: int
    alpha: float
    min_size: int
    rng: np.random.Generator

    def labels(self) -> tuple[Indices, Indices]:
        """Classes of the training and test examples to share out.

        Raises:
            DataError: The examples have several labels each.
        """
        train, test = self.dataset.train.labels, self.dataset.test.labels
        if train.ndim != 1:
            raise DataError(f"{self.dataset.name} has no one class an example; partition it by iid or natural")
        return train.numpy()[self.train], test.numpy()[self.test]

    def class_sizes(self) -> tuple[Indices, Indices]:
        """Number of training and of test examples of each class to share out, (classes,) each."""
        train, test = (np.bincount(labels, minlength=self.dataset.classes) for labels in self.labels())
        return train, test


Partitioner = Callable[[Job], list[Part]]

_PARTITIONERS: dict[str, Partitioner] = {}


def register_partition(name: str) -> Callable[[Partitioner], Partitioner]:
    """Register a partitioner, which maps a `Job` to one `Part` a client, under `name`."""

    def register(partitioner: Partitioner) -> Partitioner:
        if name in _PARTITIONERS:
            raise DataError(f"partition {name!r} is registered already")
        _PARTITIONERS[name] = partitioner
        return partitioner

    return register


def partitions() -> list[str]:
    """Names of the partitions, sorted."""
    return sorted(_PARTITIONERS)


def partition(
    dataset: DataSet,
    name: str,
    *,
    clients: int,
    seed: int,
    classes_per_client: int = 2,
    alpha: float = 0.5,
    min_size: int = 10,
    samples_per_client: int = 0,
    available: Indices | None = None,
) -> list[Part]:
    """Share out a data set among clients.

    Args:
        dataset: The data set.
        name: One of `partitions()`.
        clients: Number of clients.
        seed: The same seed gives the same parts.
        classes_per_client: For `classes`: how many classes each client has.
        alpha: For `dirichlet`: concentration; the smaller, the more clients differ.
        min_size: For `dirichlet`: the fewest training examples of a client (10 in FedMA).
        samples_per_client: The most training examples of a client, in its own class proportions; 0 for all.
        available: Training examples that may be shared out, such as `hold_out` leaves; all by default.

    Returns:
        Each client's part, in order of the clients. No example is in two parts.

    Raises:
        DataError: No such partition, or the data cannot be shared out so: which client, and what would do.
    """
    if name not in _PARTITIONERS:
        raise DataError(nearest("partition", name, _PARTITIONERS))
    if clients < 1:
        raise DataError(f"there must be at least one client to share out {dataset.name} to, not {clients}")
    if samples_per_client < 0:
        raise DataError(f"samples-per-client must be 0 (all) or more, not {samples_per_client}")
    train = np.arange(len(dataset.train)) if available is None else np.asarray(available, dtype=np.int64)
    job = Job(
        dataset=dataset,
        train=train,
        test=np.arange(len(dataset.test)),
        clients=clients,
        classes_per_client=classes_per_client,
        alpha=alpha,
        min_size=min_size,
        rng=numpy_generator(seed, "partition"),
    )
    for kind, examples in (("training", job.train), ("test", job.test)):
        if len(examples) < clients:
            raise DataError(
                f"{dataset.name} has {len(examples)} {kind} examples for {clients} clients: at most that many clients"
            )
    parts = _PARTITIONERS[name](job)
    for client, part in enumerate(parts):
        for kind, indices in zip(("training", "test"), part, strict=True):
            if len(indices) == 0:
                raise DataError(
                    f"partition {name!r} of {dataset.name} leaves client {client} of {clients} "
                    f"without {kind} examples: use fewer clients"
                )
    if samples_per_client:
        truncation = numpy_generator(seed, "samples-per-client")
        parts = [_truncated(part, dataset, samples_per_client, truncation) for part in parts]
    return [Part(np.sort(part.train), np.sort(part.test)) for part in parts]


def _truncated(part: Part, dataset: DataSet, size: int, rng: np.random.Generator) -> Part:
    labels = dataset.train.labels[part.train]
    train = part.train[proportional_sample(labels.numpy() if labels.ndim == 1 else None, len(part.train), size, rng)]
    return Part(train, part.test)


def proportional_sample(labels: Indices | None, n: int, size: int, rng: np.random.Generator) -> Indices:
    """Positions of a random sample in which each class has its share, to within one example.

    Args:
        labels: (n,) classes; None to draw without regard to classes.
        n: Number of examples to draw from.
        size: Number of examples to draw; all if there are not as many.
        rng: Source of the draw.

    Returns:
        (min(n, size),) positions in 0..n - 1.
    """
    order = rng.permutation(n)
    if labels is not None:
        # Spread each class evenly over (0, 1); the first `size` of all together then hold each class's share.
        by_class = order[np.argsort(labels[order], kind="stable")]
        counts = np.unique(labels, return_counts=True)[1]
        places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        order = by_class[np.argsort(places, kind="stable")]
    return order[:size]


@register_partition("iid")
def iid(job: Job) -> list[Part]:
    """Shuffle and deal evenly; where examples belong together (those of a patient), as evenly as that goes."""
    together = job.dataset.together
    owners = (together.train[job.train], together.test[job.test]) if together else (None, None)
    dealt = [_evenly(job, *pair) for pair in zip((job.train, job.test), owners, strict=True)]
    return [Part(*pair) for pair in zip(*dealt, strict=True)]


def _evenly(job: Job, indices: Indices, owner: Indices | None) -> list[Indices]:
    if owner is None:
        return np.array_split(job.rng.permutation(indices), job.clients)
    units = list(_split_by_owner(indices, owner).values())
    shares: list[list[Indices]] = [[] for _ in range(job.clients)]
    sizes = np.zeros(job.clients, dtype=np.int64)
    # The largest first, each to whoever has least.
    for unit in sorted((units[place] for place in job.rng.permutation(len(units))), key=len, reverse=True):
        poorest = int(sizes.argmin())
        shares[poorest].append(unit)
        sizes[poorest] += len(unit)
    return [np.concatenate(share) if share else indices[:0] for share in shares]


@register_partition("classes")
def by_classes(job: Job) -> list[Part]:
    """Every client has examples of k classes, the same k in training and test.

    Clients choose in turn among the classes that the fewest have chosen, ties at random: every class is held by equally
    many clients to within one, and by someone if clients * k suffice. Each class is dealt evenly to who holds it.

    Raises:
        DataError: There are fewer than k classes.
    """
    k, classes = job.classes_per_client, job.dataset.classes
    if not 1 <= k <= classes:
        raise DataError(f"classes-per-client must be 1 to {classes}, the classes of {job.dataset.name}, not {k}")
    holds = np.zeros((job.clients, classes), dtype=bool)
    for client in range(job.clients):
        holds[client, np.lexsort((job.rng.random(classes), holds.sum(0)))[:k]] = True
    return _dealt(job, *(_even_counts(holds, sizes, job.rng) for sizes in job.class_sizes()))


def _even_counts(holds: NDArray[np.bool_], sizes: Indices, rng: np.random.Generator) -> Indices:
    """How many of each class's examples each client gets, (clients, classes): evenly among those that hold the class.

    What is left over goes to the clients that have got least so far, so that few examples leave nobody empty-handed.
    """
    counts = np.zeros(holds.shape, dtype=np.int64)
    for label, size in enumerate(sizes):
        holders = np.flatnonzero(holds[:, label])
        if len(holders):
            poorest_first = holders[np.lexsort((rng.random(len(holders)), counts[holders].sum(1)))]
            counts[poorest_first, label] = size // len(holders) + (np.arange(len(holders)) < size % len(holders))
    return counts


@register_partition("dirichlet")
def dirichlet(job: Job) -> list[Part]:
    """Each class is dealt in proportions p ~ Dir(alpha) over clients, the same p in training and test.

    As in FedMA (section 3) and its code: a client that has its fair share of the examples already gets nothing of the
    classes that follow, and the draw is repeated while a client has fewer than `min_size`, at most
    `DIRICHLET_TRIES` times here.

    Raises:
        DataError: alpha is not positive, or no draw gave every client enough.
    """
    if not job.alpha > 0:
        raise DataError(f"alpha must be positive, not {job.alpha}")
    fair_share = len(job.train) / job.clients
    train_sizes, test_sizes = job.class_sizes()
    for _ in range(DIRICHLET_TRIES if job.min_size <= fair_share else 0):
        train, test = (np.zeros((job.clients, job.dataset.classes), dtype=np.int64) for _ in range(2))
        for label in range(job.dataset.classes):
            drawn = job.rng.dirichlet(np.full(job.clients, job.alpha)) * (train.sum(1) < fair_share)
            if not drawn.sum() > 0:
                break  # with a tiny alpha, one client draws all of a class, and that one is full
            train[:, label] = _rounded(drawn / drawn.sum(), train_sizes[label])
            test[:, label] = _rounded(drawn / drawn.sum(), test_sizes[label])
        else:
            if train.sum(1).min() >= job.min_size and test.sum(1).min() >= 1:
                return _dealt(job, train, test)
    raise DataError(
        f"no Dirichlet partition of {job.dataset.name} with alpha {job.alpha:g} gives each of {job.clients} clients "
        f"at least {job.min_size} of {len(job.train)} training examples and one of {len(job.test)} test examples: "
        "use a larger alpha or fewer clients"
    )


@register_partition("natural")
def natural(job: Job) -> list[Part]:
    """Every client is one of the data set's own, such as a speaking role; a random choice if there are more of those.

    Raises:
        DataError: The data set has no clients of its own, or fewer than asked for.
    """
    groups = job.dataset.groups
    if groups is None:
        raise DataError(f"{job.dataset.name} has no natural clients; partition it by iid, classes or dirichlet")
    train_owner, test_owner = groups.train[job.train], groups.test[job.test]
    owners = np.intersect1d(train_owner, test_owner)
    if job.clients > len(owners):
        raise DataError(f"{job.dataset.name} has {len(owners)} natural clients, not {job.clients}: use at most as many")
    chosen = np.sort(job.rng.choice(owners, job.clients, replace=False))
    train, test = _split_by_owner(job.train, train_owner), _split_by_owner(job.test, test_owner)
    return [Part(train[owner], test[owner]) for owner in chosen]


def _split_by_owner(indices: Indices, owner: Indices) -> dict[int, Indices]:
    owners, starts = np.unique(np.sort(owner), return_index=True)
    return dict(zip(owners.tolist(), np.split(indices[np.argsort(owner, kind="stable")], starts[1:]), strict=True))


def _rounded(shares: NDArray[np.float64], size: int) -> Indices:
    """Whole numbers (clients,) that sum to `size`, in proportion to shares that sum to 1."""
    ends: Indices = np.rint(np.minimum(np.cumsum(shares), 1) * size).astype(np.int64)
    return np.diff(ends, prepend=np.int64(0))


def _dealt(job: Job, train_counts: Indices, test_counts: Indices) -> list[Part]:
    """Deal as many random examples of each class as the counts, (clients, classes), say."""
    dealt = []
    for indices, labels, counts in zip((job.train, job.test), job.labels(), (train_counts, test_counts), strict=True):
        pieces: list[list[Indices]] = [[] for _ in range(job.clients)]
        for label in range(job.dataset.classes):
            of_class = job.rng.permutation(indices[labels == label])
            ends = np.cumsum(counts[:, label])
            for mine, start, end in zip(pieces, ends - counts[:, label], ends, strict=True):
                mine.append(of_class[start:end])
        dealt.append([np.concatenate(mine) for mine in pieces])
    return [Part(*pair) for pair in zip(*dealt, strict=True)]

"""Helpers of several methods: arrays by class, rows of the public dataset, and networks that the server trains."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedhet.algorithms.alignment.packing import check_received_features, unpack
from fedhet.data import Examples
from fedhet.errors import ModelError
from fedhet.messages import Arrays, Reply, WireError, check
from fedhet.tasks import Task
from fedhet.training import Phase, train
from fedhet.utils.machine import one_thread
from fedhet.utils.randomness import seeded, torch_generator
from fedhet.utils.text import log

N = TypeVar("N", bound=nn.Module)

MOST_CLASSES = 2**16
"""The largest number of classes; clients allocate memory for all of them."""

MOST_TOKENS = 2**16
"""The largest number of tokens of one example."""

# ---- what clients send


def class_counts(reply: Reply, classes: int) -> NDArray[Any]:
    """Return a client's class counts, (classes,) int64; raise a WireError if they do not fit its training examples."""
    arrays = reply.arrays.get("classes", {})
    check(arrays, {"counts": ((classes,), "int64")}, "its class counts")
    counts = arrays["counts"]
    if counts.min(initial=0) < 0:
        raise WireError("its class counts are negative")
    if counts.sum(dtype=float) != reply.examples:
        raise WireError(
            f"its class counts are of {counts.sum(dtype=float):g} examples, and it trains on {reply.examples}"
        )
    return counts


def class_means(sent: Sequence[Arrays], known: Arrays) -> Arrays:
    """Return the mean vector of each class over clients, weighted by their numbers of examples.

    Args:
        sent: for each client `classes` (k,) int64, `means` (k, d) float32 and `counts` (k,) int64.
        known: the previous `classes` and `means`; a class that no client sent keeps its mean. May be empty.

    Returns:
        `classes`, ascending, and `means` (k, d) float32.
    """
    classes, rows = np.unique(np.concatenate([group["classes"] for group in sent]), return_inverse=True)
    counts = np.concatenate([group["counts"] for group in sent]).astype(np.float64)
    sums = np.zeros((len(classes), sent[0]["means"].shape[1]))
    np.add.at(sums, rows, np.concatenate([group["means"] for group in sent]) * counts[:, None])
    means = sums / np.bincount(rows, counts)[:, None]
    if known:
        kept = ~np.isin(known["classes"], classes)
        classes = np.concatenate([classes, known["classes"][kept]])
        means = np.concatenate([means, known["means"][kept]])
    order = np.argsort(classes)
    return {"classes": classes[order], "means": means[order].astype(np.float32)}


def packed_rows(reply: Reply, name: str, check: Callable[[Tensor], object] | None = None) -> Tensor:
    """Return rows (n, d) that a client packed; raise a WireError if there are none or `check` raises a ValueError."""
    if name not in reply.arrays:
        raise WireError(f"its {name} are missing")
    try:
        rows = unpack(reply.arrays[name])
        check_received_features(rows, name)
        if check:
            check(rows)
    except ValueError as error:
        raise WireError(f"its {name} cannot be read: {error}") from error
    return rows


def mean_distance(replies: Iterable[Reply]) -> float | None:
    """Return the mean of the values `distance` of replies; None if no reply has one."""
    distances = [reply.payload.values["distance"] for reply in replies if "distance" in reply.payload.values]
    return float(np.mean(distances)) if distances else None


# ---- public examples


def tokens_of(reply: Reply) -> int:
    """Return the number of tokens of a client's examples, by default 1."""
    return reply.values.count("tokens", 1, at_least=1, at_most=MOST_TOKENS)


def public_rows(generator: np.random.Generator, size: int, tokens: int, count: int) -> NDArray[Any]:
    """Draw `count` different rows of a public dataset, or all if it has fewer.

    A row is an example or, if examples have several tokens, a token: row r is token r % tokens of example r // tokens.
    """
    if tokens <= 1:
        return generator.permutation(size)[:count].astype(np.int32)
    return generator.choice(size * tokens, min(count, size * tokens), replace=False)


# ---- networks that the server trains


def build_at_server(build: Callable[[], N], seed: int) -> N:
    """Build a network of the server's, with initial weights drawn from the run's seed."""
    with seeded(seed, "initial weights", "server"):
        return build()


def train_at_server(
    network: nn.Module,
    phase: Phase,
    examples: Examples,
    seed: int,
    round: int,
    transform: Callable[[Tensor], Tensor] = lambda batch: batch,
) -> dict[str, float] | None:
    """Train a network of the server's on its device, with random streams of the seed and the round.

    `transform` turns a batch of raw inputs into the network's inputs.

    Returns:
        The metric `server_loss`, if there is a loss; None if training diverges.
    """
    task, generator = Task("classification"), torch_generator(seed, "server", round)
    try:
        with one_thread(), seeded(seed, "dropout", "server", round):
            trained = train(network, phase, examples, task, lambda batch, _: transform(batch), generator=generator)
    except ModelError as error:
        log.warning("round %d: the server's network is unchanged: %s", round, error)
        return None
    return {} if trained.mean_loss is None else {"server_loss": trained.mean_loss}

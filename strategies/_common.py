"""Functions that the strategies of several methods use: mean vectors of classes, and training at the server."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedhet.data import Examples
from fedhet.errors import ModelError
from fedhet.messages import Arrays, Reply, WireError, check, load_into, to_arrays
from fedhet.tasks import Task
from fedhet.training import Phase, Training
from fedhet.utils.process import standard_settings
from fedhet.utils.randomness import derive_seed, seeded, torch_generator
from fedhet.utils.text import log

N = TypeVar("N", bound=nn.Module)

MOST_CLASSES = 2**16
"""The largest number of classes that a network may have; clients allocate memory for all of them."""


def outputs_of(reply: Reply) -> int:
    """Return the number of outputs of a client's network; raise a ModelError if it is 0 or above `MOST_CLASSES`."""
    if not 0 < reply.report.outputs <= MOST_CLASSES:
        raise ModelError(f"the client's network has {reply.report.outputs} outputs: give it 1 to {MOST_CLASSES}")
    return reply.report.outputs


def class_counts(reply: Reply, classes: int) -> NDArray[Any]:
    """Return a client's number of examples of each class, (classes,) int64; raise a WireError if invalid."""
    arrays = reply.arrays.get("classes", {})
    check(arrays, {"counts": ((classes,), "int64")}, "the client's class counts")
    counts = arrays["counts"]
    if counts.min(initial=0) < 0:
        raise WireError("the client's class counts must not be negative: use the server's version of fedhet")
    if counts.sum(dtype=float) != reply.examples:
        total = counts.sum(dtype=float)
        raise WireError(f"the client has {reply.examples} examples, but class counts sum to {total:g}: check its mods")
    return counts


def class_means(sent: Sequence[Arrays], known: Arrays) -> Arrays:
    """Return the mean vector of each class over clients, weighted by the clients' numbers of examples of the class.

    `sent` has each client's arrays `classes` (k,) int64, `means` (k, d) float32 and `counts` (k,) int64, for k classes.
    Classes that no client sent keep the means of the previous result `known`. Returns ascending `classes`, and `means`.
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


def build_at_server(build: Callable[[], N], seed: int) -> N:
    with seeded(seed, "initial weights", "server"):
        return build()


def train_at_server(
    network: nn.Module,
    weights: Arrays,
    phase: Phase,
    examples: Examples,
    seed: int,
    round: int,
    transform: Callable[[Tensor], Tensor] = lambda batch: batch,
) -> tuple[Arrays, dict[str, float]]:
    """Train a network at the server, starting from `weights` unless empty; return the new weights and a metric.

    `phase` sets epochs, optimizer and loss terms; `transform` prepares a batch of raw inputs; `seed` and `round` seed
    random numbers. The metric `server_loss` is the mean loss. If training diverges, returns `weights` and no metric.
    """
    load_into(network.state_dict(), weights)
    task, generator = Task("classification"), torch_generator(seed, "server", round)
    purpose = "dropout", "server", round
    try:
        with standard_settings(), seeded(seed, *purpose):
            dropout = derive_seed(seed, *purpose)
            training = Training(network, phase, examples, task, lambda batch, _: transform(batch), generator, dropout)
            trained = training.result()
    except ModelError as error:
        log.warning("round %d: training failed, so the server's network is unchanged: %s", round, error)
        return weights, {}
    metrics = {} if trained.mean_loss is None else {"server_loss": trained.mean_loss}
    return to_arrays(network.state_dict()), metrics

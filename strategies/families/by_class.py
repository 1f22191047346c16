"""Methods whose clients send a vector for each class: a mean representation (prototype) or a mean output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedhet.errors import ModelError
from fedhet.messages import Arrays, Payload, Reply, WireError, check
from fedhet.methods.options import Options, Value, option
from fedhet.server import STRUCTURE, Common, FederatedStrategy, State, Traits

MOST_CLASSES = 2**16
"""The largest number of classes that a network may have; clients allocate memory for all of them."""

WIDTH = "representation width"
"""Name of the width that all clients have in common, in `State.common`."""

PROTOTYPES = Traits(keeps="model", other_arrays="whole", sends={"prototypes": "prototypes", "width": STRUCTURE})
"""Traits of methods whose clients keep their networks and send mean representations of classes."""


width_option = partial(
    option,
    0,
    "width to which a linear layer before the head projects representations; 0: no such layer",
    at_least=0,
    at_most=2**16,
)
"""Return the key `width` of methods whose clients need representations of equal width; takes further arguments."""


@dataclass(frozen=True)
class WidthKeys(Options):
    """Key of methods whose clients need representations of equal `width`."""

    width: int = width_option(at_need=64)

    def suited(self) -> dict[str, tuple[Value, str]]:
        """Return {"width": (`width`, reason)}, as a layer this wide is added to a user's models; {} if `width` is 0."""
        reason = "the width of a linear layer that is added before the head of each model (0: no such layer)"
        return {"width": (self.width, reason)} if self.width else {}

    @property
    def changes_heads(self) -> bool:  # type: ignore[override]
        """Whether heads are replaced: by a linear layer with `width` outputs, followed by a new head."""
        return self.width > 0


@dataclass
class ClassState(State):
    """The state of a method whose clients send a vector (mean representation or output) for each class they have.

    `prototypes` has vectors `means` (k, `width`) of `classes` (k,), which are numbers from 0 to `outputs` - 1.
    """

    width: int = 0
    outputs: int = MOST_CLASSES
    prototypes: Arrays = field(default_factory=dict)


P = TypeVar("P", bound=Options)
C = TypeVar("C", bound=ClassState)


class ByClass(FederatedStrategy[P, C]):
    """Base class of strategies that average the vectors which clients send for each class."""

    def payload_for(self, client: str) -> Payload:
        return Payload({"prototypes": self.state.prototypes} if self.state.prototypes else {})

    def common(self, reply: Reply) -> Mapping[str, Common]:
        return common_width(reply, self.method.family)

    def admit(self, reply: Reply) -> None:
        self.state.width = width_of(reply)

    def check_reply(self, reply: Reply) -> None:
        arrays = reply.arrays.get("prototypes", {})
        k = arrays["classes"].size if "classes" in arrays else 0
        expected = {"means": ((k, self.state.width), "float32"), "classes": ((k,), "int64"), "counts": ((k,), "int64")}
        check(arrays, expected, "the client's prototypes")
        classes = arrays["classes"]
        last = self.state.outputs - 1
        if k and (classes.min() < 0 or classes.max() > last or len(set(classes)) < k):
            raise WireError(f"the client's prototypes must have distinct classes from 0 to {last}: check its labels")
        if arrays["counts"].min(initial=1) < 1 or arrays["counts"].sum(dtype=float) > reply.examples:
            raise WireError(
                f"the client's prototypes must have positive numbers of examples, in total at most {reply.examples}: "
                "check the client's mods"
            )

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        vectors = self.bounded(replies) if self.config.aggregation == "mean" else [self.combined(replies)]
        self.state.prototypes = class_means(vectors, self.state.prototypes)
        return {}

    def bounded(self, replies: Mapping[str, Reply]) -> list[Arrays]:
        """Return each client's `classes` (k,), `means` (k, width) clipped by `clip-norm`, and weights `counts` (k,)."""
        sent = {client: reply.arrays["prototypes"] for client, reply in replies.items()}
        means = self.aggregator.clipped({client: {"means": arrays["means"]} for client, arrays in sent.items()})
        weights = self.aggregator.weights(replies)
        shares = {client: weights[client] / replies[client].examples for client in weights}
        return [a | means[c] | {"counts": a["counts"] * shares[c]} for c, a in sent.items()]

    def combined(self, replies: Mapping[str, Reply]) -> Arrays:
        """Return `classes` (k,), their mean vectors `means` by the rule `aggregation`, and weights `counts` of 1."""
        sent = {client: reply.arrays["prototypes"] for client, reply in replies.items()}
        by_class = {
            client: dict(zip(map(str, arrays["classes"]), arrays["means"], strict=True))
            for client, arrays in sent.items()
        }
        averages = self.aggregator.average(by_class, before={})
        classes = np.array(sorted(map(int, averages)), np.int64)
        means = np.array([averages[str(number)] for number in classes], np.float32)
        return {"classes": classes, "means": means.reshape(-1, self.state.width), "counts": np.ones_like(classes)}


def common_width(reply: Reply, family: str) -> Mapping[str, Common]:
    """Return the width of a client's representations, for `FederatedStrategy.common`; `family` prefixes its key."""
    return {WIDTH: Common(width_of(reply), f"set {family}.width, to which all representations are then projected")}


def width_of(reply: Reply) -> int:
    """Return the width of a client's vectors of classes; raise a WireError if it is invalid."""
    return reply.values.count("width", at_least=1, at_most=MOST_CLASSES)


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


def class_means(sent: Sequence[Arrays], before: Arrays) -> Arrays:
    """Return the mean vector of each class over clients, weighted by the clients' numbers of examples of the class.

    `sent` has each client's arrays `classes` (k,) int64, `means` (k, d) float32 and `counts` (k,) int64, for k classes.
    Classes that no client sent keep the means of the result `before`. Returns ascending `classes`, and `means`.
    """
    classes, rows = np.unique(np.concatenate([group["classes"] for group in sent]), return_inverse=True)
    counts = np.concatenate([group["counts"] for group in sent]).astype(np.float64)
    sums = np.zeros((len(classes), sent[0]["means"].shape[1]))
    np.add.at(sums, rows, np.concatenate([group["means"] for group in sent]) * counts[:, None])
    means = sums / np.bincount(rows, counts)[:, None]
    if before:
        kept = ~np.isin(before["classes"], classes)
        classes = np.concatenate([classes, before["classes"][kept]])
        means = np.concatenate([means, before["means"][kept]])
    order = np.argsort(classes)
    return {"classes": classes[order], "means": means[order].astype(np.float32)}

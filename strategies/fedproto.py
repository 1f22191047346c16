"""FedProto, server side: prototypes of classes are averaged, no weights (Tan et al., AAAI 2022, equation 6)."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import numpy as np

from fedhet.errors import ModelError
from fedhet.methods import fedproto
from fedhet.server import FederatedStrategy, State, class_means
from fedhet.server.hooks import P
from fedhet.wire import Arrays, Payload, Reply, WireError, check

MOST_CLASSES = 2**16
"""Class numbers from this on are refused: clients make room for all classes below the highest."""


@dataclass
class ClassState(State):
    """`prototypes` are the global vectors: `classes` (k,) and `means` (k, width)."""

    width: int = 0
    prototypes: Arrays = field(default_factory=dict)


C = TypeVar("C", bound=ClassState)


class ByClass(FederatedStrategy[P, C]):
    """The server side that FedProto and FD share: averages the clients' vector of each class.

    Attributes:
        vectors: name of the vectors, for errors.
        way_out: the way out where clients' vectors are not equally wide.
    """

    state_class = ClassState
    vectors: ClassVar[str]
    way_out: ClassVar[str]

    def payload_for(self, client: str) -> Payload:
        """Return the global vectors, (classes known, width), and the classes' numbers."""
        return Payload({"prototypes": self.state.prototypes} if self.state.prototypes else {})

    def compatibility(self, reply: Reply) -> Hashable:
        """Beside the default, the width of the vectors."""
        return super().compatibility(reply), str(reply.payload.values.get("width"))

    def admit(self, reply: Reply) -> None:
        """Check that vectors are equally wide, or there is no mean of them."""
        width = reply.values.count("width", at_least=1, at_most=MOST_CLASSES)
        self.state.width = self.state.width or width
        if width != self.state.width:
            raise ModelError(
                f"its {self.vectors} has width {width}, the first client's {self.state.width}: {self.way_out}"
            )

    def check_reply(self, reply: Reply) -> None:
        """Check that vectors are (k, width), with k classes and k numbers of examples."""
        own = reply.arrays.get("prototypes", {})
        k = own["classes"].size if "classes" in own else 0
        means = ((k, self.state.width), "float32")
        check(own, {"means": means, "classes": ((k,), "int64"), "counts": ((k,), "int64")}, "its prototypes")
        classes = own["classes"]
        if k and (classes.min() < 0 or classes.max() >= MOST_CLASSES or len(set(classes)) < k):
            raise WireError("its prototypes have classes that cannot be")
        if own["counts"].min(initial=1) < 1 or own["counts"].sum(dtype=float) > reply.examples:
            raise WireError("its prototypes have numbers of examples that are not those of its training examples")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """C_j = sum_i n_ij C_ij / sum_i n_ij; a class that nobody of this round holds keeps its vector."""
        sent = {client: reply.arrays["prototypes"] for client, reply in replies.items()}
        vectors = list(sent.values()) if self.aggregator.plain else [self.combined(sent)]
        self.state.prototypes = class_means(vectors, self.state.prototypes)
        return {}

    def combined(self, sent: Mapping[str, Arrays]) -> Arrays:
        """Return the vectors of classes by the key `aggregation`, with counts of 1: all clients count the same."""
        by_class = {
            client: dict(zip(own["classes"].tolist(), own["means"], strict=True)) for client, own in sent.items()
        }
        found = self.aggregator.average_arrays(by_class)
        classes = np.array(sorted(found), np.int64)
        means = np.array([found[number] for number in classes.tolist()], np.float32)
        width = next(iter(sent.values()))["means"].shape[1]
        return {"classes": classes, "means": means.reshape(-1, width), "counts": np.ones_like(classes)}


class FedProto(ByClass[fedproto.FedProtoParameters, ClassState]):
    """Averages the clients' mean representation of each class."""

    method = fedproto.method
    vectors = "representation"
    way_out = "set fedproto.width, to which all are then projected"

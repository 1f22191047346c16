"""FedProto, server side: class prototypes are averaged instead of weights (Tan et al., AAAI 2022, equation 6)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import numpy as np

from fedhet.messages import Arrays, Payload, Reply, WireError, check
from fedhet.methods.included.prototypes import FedProtoOptions, fedproto
from fedhet.methods.options import Options
from fedhet.server import Common, FederatedStrategy, State

from ._common import MOST_CLASSES, class_means  # noqa: TID251 - this folder is fedhet.strategies


@dataclass
class ClassState(State):
    """The state: `prototypes` are the global vectors of known classes, as `classes` (k,) and `means` (k, width)."""

    width: int = 0
    prototypes: Arrays = field(default_factory=dict)


P = TypeVar("P", bound=Options)
C = TypeVar("C", bound=ClassState)


class ByClass(FederatedStrategy[P, C]):
    """The server side of FedProto and FD: averages the clients' vectors of each class.

    Attributes:
        vectors: name of the vectors in error messages.
        way_out: advice in error messages for a client whose vectors have another width.
    """

    state_class = ClassState
    vectors: ClassVar[str]
    way_out: ClassVar[str]

    def payload_for(self, client: str) -> Payload:
        """Return the global vectors of all known classes, and the numbers of these classes."""
        return Payload({"prototypes": self.state.prototypes} if self.state.prototypes else {})

    def common(self, reply: Reply) -> Mapping[str, Common]:
        """Return the width of the client's vectors, which must be the same for all clients."""
        return {f"{self.vectors} width": Common(_width(reply), self.way_out)}

    def admit(self, reply: Reply) -> None:
        """Keep the width of the client's vectors."""
        self.state.width = _width(reply)

    def check_reply(self, reply: Reply) -> None:
        """Check that the client's vectors have shape (k, width), with k classes and k numbers of examples."""
        arrays = reply.arrays.get("prototypes", {})
        k = arrays["classes"].size if "classes" in arrays else 0
        means = ((k, self.state.width), "float32")
        check(
            arrays, {"means": means, "classes": ((k,), "int64"), "counts": ((k,), "int64")}, "the client's prototypes"
        )
        classes = arrays["classes"]
        if k and (classes.min() < 0 or classes.max() >= MOST_CLASSES or len(set(classes)) < k):
            raise WireError("the client's prototypes have classes that are repeated or out of range")
        if arrays["counts"].min(initial=1) < 1 or arrays["counts"].sum(dtype=float) > reply.examples:
            raise WireError("the client's prototypes have numbers of examples that do not fit its training examples")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average the vectors of each class, C_j = sum_i n_ij C_ij / sum_i n_ij.

        A class that no client of the round has keeps its vector.
        """
        sent = {client: reply.arrays["prototypes"] for client, reply in replies.items()}
        vectors = list(sent.values()) if self.aggregator.plain else [self.combined(sent)]
        self.state.prototypes = class_means(vectors, self.state.prototypes)
        return {}

    def combined(self, sent: Mapping[str, Arrays]) -> Arrays:
        """Return the vector of each class, aggregated by the rule `aggregation` with all clients weighted equally."""
        by_class = {
            client: dict(zip(arrays["classes"].tolist(), arrays["means"], strict=True))
            for client, arrays in sent.items()
        }
        averages = self.aggregator.average_arrays(by_class)
        classes = np.array(sorted(averages), np.int64)
        means = np.array([averages[number] for number in classes.tolist()], np.float32)
        width = next(iter(sent.values()))["means"].shape[1]
        return {"classes": classes, "means": means.reshape(-1, width), "counts": np.ones_like(classes)}


def _width(reply: Reply) -> int:
    return reply.values.count("width", at_least=1, at_most=MOST_CLASSES)


class FedProto(ByClass[FedProtoOptions, ClassState]):
    """Averages the clients' prototype (mean representation) of each class."""

    method = fedproto
    vectors = "representation"
    way_out = "set fedproto.width, to which all representations are then projected"

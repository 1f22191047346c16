"""FedProto and FD, server side: vectors of classes are averaged instead of weights.

FedProto (Tan et al., AAAI 2022, equation 6) averages prototypes, the clients' mean representations of each class. In
FD (Jeong et al., 2018, algorithm 1), each client receives the mean logits of the other clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import numpy as np

from fedhet.messages import Arrays, Payload, Reply, WireError, check
from fedhet.methods.included.prototypes import FDOptions, FedProtoOptions, fd, fedproto
from fedhet.methods.options import Options
from fedhet.server import ArraysBy, Common, FederatedStrategy, State, in_order

from ._common import MOST_CLASSES, class_means


@dataclass
class ClassState(State):
    """The state, with the global vectors of classes (`prototypes`) as arrays `classes` (k,) and `means` (k, width)."""

    width: int = 0
    prototypes: Arrays = field(default_factory=dict)


P = TypeVar("P", bound=Options)
C = TypeVar("C", bound=ClassState)


class ByClass(FederatedStrategy[P, C]):
    """Averages the clients' vectors of each class.

    `vectors` is their name in error messages, and `way_out` the advice for a client whose vectors have another width.
    """

    state_class = ClassState
    vectors: ClassVar[str]
    way_out: ClassVar[str]

    def payload_for(self, client: str) -> Payload:
        return Payload({"prototypes": self.state.prototypes} if self.state.prototypes else {})

    def common(self, reply: Reply) -> Mapping[str, Common]:
        return {f"{self.vectors} width": Common(_width(reply), self.way_out)}

    def admit(self, reply: Reply) -> None:
        self.state.width = _width(reply)

    def check_reply(self, reply: Reply) -> None:
        arrays = reply.arrays.get("prototypes", {})
        k = arrays["classes"].size if "classes" in arrays else 0
        means = ((k, self.state.width), "float32")
        check(
            arrays, {"means": means, "classes": ((k,), "int64"), "counts": ((k,), "int64")}, "the client's prototypes"
        )
        classes = arrays["classes"]
        if k and (classes.min() < 0 or classes.max() >= MOST_CLASSES or len(set(classes)) < k):
            raise WireError(f"the client's prototypes must be of different classes from 0 to {MOST_CLASSES - 1}")
        if arrays["counts"].min(initial=1) < 1 or arrays["counts"].sum(dtype=float) > reply.examples:
            raise WireError(f"the client's prototypes have example counts below 1, or above {reply.examples} in total")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average the vectors of class j by numbers of examples n_ij; a class that no client sent keeps its vector."""
        sent = {client: reply.arrays["prototypes"] for client, reply in replies.items()}
        means = self.aggregator.clipped({client: {"means": arrays["means"]} for client, arrays in sent.items()})
        bounded = [arrays | means[client] for client, arrays in sent.items()]
        vectors = bounded if self.aggregator.plain else [self.combined(sent)]
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


@dataclass
class FDState(ClassState):
    """The state of FD: `own` has the latest mean logits by class of each client."""

    own: ArraysBy = field(default_factory=dict)


class FD(ByClass[FDOptions, FDState]):
    """Sends each client the mean logits of each class over the other clients that have the class, equally weighted."""

    method = fd
    state_class = FDState
    vectors = "prediction"
    way_out = "all clients need the same classes"

    def payload_for(self, client: str) -> Payload:
        peers = {peer: self.state.own[peer] for peer in in_order(self.state.own) if peer != client}
        if not peers:
            return Payload()
        vectors = [arrays | {"counts": np.ones(len(arrays["classes"]))} for arrays in peers.values()]
        return Payload({"prototypes": class_means(vectors, {})})

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        self.state.own |= {client: reply.arrays["prototypes"] for client, reply in replies.items()}
        return {}

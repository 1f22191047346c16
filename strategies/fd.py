"""FD, server side: each client receives the other clients' mean logits by class (Jeong et al., 2018, algorithm 1)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedhet.messages import Payload, Reply
from fedhet.methods.included.prototypes import FDOptions, fd
from fedhet.server import ArraysBy, in_order

from ._common import class_means  # noqa: TID251 - this folder is fedhet.strategies
from .fedproto import ByClass, ClassState  # noqa: TID251


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
        """Return the mean logits over the other clients; an empty payload if no other client has sent any."""
        peers = {peer: self.state.own[peer] for peer in in_order(self.state.own) if peer != client}
        if not peers:
            return Payload()
        vectors = [arrays | {"counts": np.ones(len(arrays["classes"]))} for arrays in peers.values()]
        return Payload({"prototypes": class_means(vectors, {})})

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Keep the mean logits that each client sent."""
        self.state.own |= {client: reply.arrays["prototypes"] for client, reply in replies.items()}
        return {}

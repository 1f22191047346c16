"""FD (Jeong et al., 2018, algorithm 1): clients share their mean outputs (logits) of each class.

    client i:  w_i = argmin_w  L_i(w) + weight mean_(x, j) CE(f_w(x), softmax(F_-i^j))
    client i:  sends F_i^j, the mean of f_w(x) over its examples of class j
    server:    F_-i^j = mean of F_k^j over the other clients k that have class j

The mean over (x, j) is over the client's examples x of class j.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedhet.server import STRUCTURE, ArraysBy, Common, Options, Payload, Reply, Traits, in_order, method, option

from .families.by_class import ByClass, ClassState, class_means, width_of


@dataclass(frozen=True)
class Keys(Options):
    weight: float = option(0.1, "weight of the cross entropy to the peers' mean prediction of the class", at_least=0)


@dataclass
class MeanLogits(ClassState):
    """The state of FD: `own` has, by client, the latest mean logits of each class."""

    own: ArraysBy = field(default_factory=dict)


@method(
    "fd",
    Traits(keeps="model", other_arrays="mean", sends={"prototypes": "posteriors", "width": STRUCTURE}, inside=""),
    Keys,
    client="fedhet.client_apps.fd:FD",
)
class FD(ByClass[Keys, MeanLogits]):
    """FD: sends each client the unweighted mean logits of each class over the other clients that have the class."""

    def common(self, reply: Reply) -> Mapping[str, Common]:
        return {"prediction width": Common(width_of(reply), "all clients need the same classes")}

    def payload_for(self, client: str) -> Payload:
        peers = {peer: self.state.own[peer] for peer in in_order(self.state.own) if peer != client}
        if not peers:
            return Payload()
        vectors = [arrays | {"counts": np.ones(len(arrays["classes"]))} for arrays in peers.values()]
        return Payload({"prototypes": class_means(vectors, {})})

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        self.state.own |= {client: reply.arrays["prototypes"] for client, reply in replies.items()}
        return {}

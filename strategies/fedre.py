"""FedRE (Yao et al., CVPR 2026): the server trains one head for all on a random mix of each client's prototypes.

    client i:  replaces its head by h, trains, draws v_j from U(0, 1) for each of its classes, and w_j = v_j / sum_k v_k
    client i:  sends R_i = sum_j w_j C_i^j and Y_i = sum_j w_j e_j
    server:    h = argmin_h  sum_i sum_j Y_ij CE(h(R_i), j)

C_i^j is the mean representation of the client's examples of class j, and e_j its one-hot encoding. Weights are drawn
anew in each round. The server trains for one epoch per round.
"""

from collections.abc import Mapping

from torch import Tensor

from fedhet.messages import Arrays, Spec, check
from fedhet.server import Reply, WireError, method
from fedhet.training import Loss, Step

from .families.at_server import LearnerKeys
from .families.by_class import PROTOTYPES
from .fedgh import FedGH


@method(
    "fedre",
    PROTOTYPES,
    LearnerKeys,
    client="fedhet.client_apps.fedre:FedRE",
    own={"fedre.width": 32, "fedre.server-learning-rate": 0.1},
)
class FedRE(FedGH):
    """FedRE: a linear head for all clients, which the server trains on one mixed representation of each client."""

    def check_reply(self, reply: Reply) -> None:
        arrays = reply.arrays.get("prototypes", {})
        n = len(arrays["means"]) if "means" in arrays and arrays["means"].ndim else 0
        expected: Spec = {"means": ((n, self.state.width), "float32"), "classes": ((n, self.state.outputs), "float32")}
        check(arrays, expected, "the client's mixed prototypes")
        classes = arrays["classes"]
        if n > 1 or classes.min(initial=0) < 0 or (n and abs(float(classes.sum()) - 1) > 1e-3):
            raise WireError("a client must send one vector, with weights of classes that sum to 1: check its mods")

    def bounded(self, replies: Mapping[str, Reply]) -> list[Arrays]:
        sent = {client: reply.arrays["prototypes"] for client, reply in replies.items()}
        means = self.aggregator.clipped({client: {"means": arrays["means"]} for client, arrays in sent.items()})
        return [arrays | means[client] for client, arrays in sent.items()]

    def terms(self, means: Tensor, classes: Tensor) -> tuple[Loss, ...]:
        return (mixed_cross_entropy,)


def mixed_cross_entropy(step: Step) -> Tensor:
    """Return the cross entropy of a step's outputs (n, C) to the mixed labels (n, C), summed over the examples."""
    losses: Tensor = -(step.labels * step.outputs.log_softmax(1)).sum()
    return losses

"""FedGH (Yi et al., ACM MM 2023): the server trains one head for all clients on their mean representations of classes.

    client i:  replaces its head by h, trains, and sends the mean C_i^j of Phi_w(x) over its examples of class j
    server:    h = argmin_h  sum_(i, j) CE(h(C_i^j), j)

Phi_w(x) is the representation (the head's input) of example x. The server trains for one epoch per round.
"""

import numpy as np
from torch import nn

from fedhet.server import Payload, method

from .families.at_server import Learner, LearnerKeys
from .families.by_class import PROTOTYPES


@method(
    "fedgh",
    PROTOTYPES,
    LearnerKeys,
    client="fedhet.client_apps.fedgh:FedGH",
    own={"fedgh.width": 32, "fedgh.server-learning-rate": 0.1},
)
class FedGH(Learner[LearnerKeys]):
    """FedGH: a linear head for all clients, which the server trains on their mean representations of classes."""

    def network(self) -> nn.Module:
        return nn.Linear(self.state.width, self.state.outputs)

    def payload_for(self, client: str) -> Payload:
        return Payload({"head": {name: array.astype(np.float32) for name, array in self.state.learner.items()}})

"""FedTGP (Zhang et al., AAAI 2024): FedProto with global prototypes P that the server trains.

    server:  P_c = F(v_c)                                       for class c, with embedding v_c and small network F
    server:  L = -log( exp(-(|p - P_y| + d)) / (exp(-(|p - P_y| + d)) + sum_{c != y} exp(-|p - P_c|)) )

Here, p is a client's prototype of class y, and the margin d is the largest distance between the mean prototypes of two
classes, but at most tau.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.messages import Reply, to_arrays
from fedhet.server import method, option
from fedhet.training import Loss, Step

from .families.at_server import Learner, LearnerKeys
from .fedproto import BY_NEAREST


@dataclass(frozen=True)
class Keys(LearnerKeys):
    # The authors' values; threshold is tau, the maximum margin.
    server_epochs, threshold, predict = 100, 100.0, "all-prototypes"
    weight: float = option(0.1, "lambda, the weight of the distance to the global prototypes", at_least=0)


class Prototypes(nn.Module):
    """A network of class prototypes: for vectors (n, width), it returns negative distances to them, (n, classes)."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.hidden, self.output = nn.Linear(width, width), nn.Linear(width, width)

    def prototypes(self) -> Tensor:
        """Return the prototype of each class, (classes, width)."""
        return self.output(F.relu(self.hidden(self.embedding.weight)))

    def forward(self, vectors: Tensor) -> Tensor:
        return -torch.cdist(vectors, self.prototypes(), compute_mode="donot_use_mm_for_euclid_dist")


@method("fedtgp", BY_NEAREST, Keys, client="fedhet.client_apps.fedproto:FedProto", own={"fedtgp.width": 32})
class FedTGP(Learner[Keys]):
    """FedTGP: global prototypes of all classes, which the server trains on the clients' prototypes."""

    def network(self) -> Prototypes:
        return Prototypes(self.state.outputs, self.state.width)

    def terms(self, means: Tensor, classes: Tensor) -> tuple[Loss, ...]:
        one_hot = F.one_hot(classes, self.state.outputs).to(means.dtype)[:, classes.unique()]
        centres = (one_hot.T @ means) / one_hot.sum(0)[:, None]
        margin = torch.cdist(centres, centres).amax().clamp(max=self.options.threshold) if len(means) else 0.0

        def contrast(step: Step) -> Tensor:
            return F.cross_entropy(step.outputs - margin * F.one_hot(step.labels, self.state.outputs), step.labels)

        return (contrast,)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        metrics = super().aggregate_fit(round, replies)
        network = self.learner()
        assert isinstance(network, Prototypes)
        means = to_arrays({"means": network.prototypes().float()})
        self.state.prototypes = {"classes": np.arange(self.state.outputs), **means}
        return metrics

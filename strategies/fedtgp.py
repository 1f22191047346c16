r"""FedTGP, server side: prototypes that are trained, not averaged (Zhang et al., AAAI 2024).

    P_c = F(e_c)                                                     an embedding of class c, and a small network F
    L = -log( exp(-(|p - P_y| + d)) / (exp(-(|p - P_y| + d)) + sum_{c != y} exp(-|p - P_c|)) )

where p is a client's prototype of class y, and the margin d is the largest distance between two classes' means over
clients, but at most tau.
"""

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.messages import Reply, to_arrays
from fedhet.methods.included import fedtgp
from fedhet.training import Loss, Step

from .fedgh import Learner  # noqa: TID251 - this folder is fedhet.strategies


class Prototypes(nn.Module):
    """Prototypes of the classes; for vectors (n, width) it returns minus the distances to them (n, classes)."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.hidden, self.output = nn.Linear(width, width), nn.Linear(width, width)

    def prototypes(self) -> Tensor:
        """Return the prototypes (classes, width)."""
        outputs: Tensor = self.output(F.relu(self.hidden(self.embedding.weight)))
        return outputs

    def forward(self, vectors: Tensor) -> Tensor:
        """Return minus the distances of vectors to the prototypes."""
        return -torch.cdist(vectors, self.prototypes(), compute_mode="donot_use_mm_for_euclid_dist")


class FedTGP(Learner[fedtgp.FedTGPParameters]):
    """Trains the global prototypes, of all classes, and sends them to the clients."""

    method = fedtgp.method

    def network(self) -> Prototypes:
        """Build the embedding and the small network."""
        return Prototypes(self.state.outputs, self.state.width)

    def terms(self, means: Tensor, classes: Tensor) -> tuple[Loss, ...]:
        """Return the cross entropy of minus the distances, with the margin added to the distance to the own class."""
        one_hot = F.one_hot(classes, self.state.outputs).to(means.dtype)[:, classes.unique()]
        centres = (one_hot.T @ means) / one_hot.sum(0)[:, None]
        margin = torch.cdist(centres, centres).amax().clamp(max=self.parameters.threshold) if len(means) else 0.0

        def contrast(step: Step) -> Tensor:
            return F.cross_entropy(step.outputs - margin * F.one_hot(step.labels, self.state.outputs), step.labels)

        return (contrast,)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Train the network, and keep the prototypes that clients receive."""
        metrics = super().aggregate_fit(round, replies)
        network = self.learner()
        assert isinstance(network, Prototypes)
        means = to_arrays({"means": network.prototypes()}, "float32")
        self.state.prototypes = {"classes": np.arange(self.state.outputs), **means}
        return metrics

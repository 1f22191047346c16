r"""FedTGP, server side: global prototypes are trained instead of averaged (Zhang et al., AAAI 2024).

    P_c = F(e_c)                                                     an embedding of class c, and a small network F
    L = -log( exp(-(|p - P_y| + d)) / (exp(-(|p - P_y| + d)) + sum_{c != y} exp(-|p - P_c|)) )

where p is a client's prototype of class y. The margin d is the largest distance between the mean prototypes of two
classes (over clients), but at most tau.
"""

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.messages import Reply, to_arrays
from fedhet.methods.included.prototypes import FedTGPOptions, fedtgp
from fedhet.training import Loss, Step

from .fedgh import Learner  # noqa: TID251 - this folder is fedhet.strategies


class Prototypes(nn.Module):
    """A network of class prototypes: for vectors (n, width), it returns the negative distance to each (n, classes)."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.hidden, self.output = nn.Linear(width, width), nn.Linear(width, width)

    def prototypes(self) -> Tensor:
        """Return the prototype of each class, (classes, width)."""
        outputs: Tensor = self.output(F.relu(self.hidden(self.embedding.weight)))
        return outputs

    def forward(self, vectors: Tensor) -> Tensor:
        """Return the negative distances of vectors (n, width) to the prototypes, (n, classes)."""
        return -torch.cdist(vectors, self.prototypes(), compute_mode="donot_use_mm_for_euclid_dist")


class FedTGP(Learner[FedTGPOptions]):
    """Trains global prototypes of all classes at the server, and sends them to the clients."""

    method = fedtgp

    def network(self) -> Prototypes:
        """Build the network that generates the prototypes: an embedding of each class and two linear layers."""
        return Prototypes(self.state.outputs, self.state.width)

    def terms(self, means: Tensor, classes: Tensor) -> tuple[Loss, ...]:
        """Return the cross entropy of negative distances to prototypes, with a margin for the vector's own class."""
        one_hot = F.one_hot(classes, self.state.outputs).to(means.dtype)[:, classes.unique()]
        centres = (one_hot.T @ means) / one_hot.sum(0)[:, None]
        margin = torch.cdist(centres, centres).amax().clamp(max=self.options.threshold) if len(means) else 0.0

        def contrast(step: Step) -> Tensor:
            return F.cross_entropy(step.outputs - margin * F.one_hot(step.labels, self.state.outputs), step.labels)

        return (contrast,)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Train the network of prototypes, and keep its prototypes for the clients."""
        metrics = super().aggregate_fit(round, replies)
        network = self.learner()
        assert isinstance(network, Prototypes)
        means = to_arrays({"means": network.prototypes()}, "float32")
        self.state.prototypes = {"classes": np.arange(self.state.outputs), **means}
        return metrics

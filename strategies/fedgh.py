"""FedGH and FedTGP, server side: a network is trained on the clients' mean representations of classes.

FedGH (Yi et al., ACM MM 2023) trains a head. FedTGP (Zhang et al., AAAI 2024) trains global prototypes:

    P_c = F(e_c)                                                     an embedding of class c, and a small network F
    L = -log( exp(-(|p - P_y| + d)) / (exp(-(|p - P_y| + d)) + sum_{c != y} exp(-|p - P_c|)) )

where p is a client's prototype of class y. The margin d is the largest distance between the mean prototypes of two
classes (over clients), but at most tau.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.data import Examples
from fedhet.errors import ModelError
from fedhet.messages import Arrays, Payload, Reply, WireError, cast, check_room, load_into, to_arrays
from fedhet.methods.included.prototypes import FedGHOptions, FedTGPOptions, LearnerOptions, fedgh, fedtgp
from fedhet.server import Common
from fedhet.training import Loss, Optimisation, Phase, Step

from ._common import MOST_CLASSES, build_at_server, train_at_server
from .fedproto import ByClass, ClassState

COPIES = 8
"""The largest number of copies of its network at the server: weights, gradients, optimiser, states."""


@dataclass
class LearnerState(ClassState):
    """The state of FedGH and FedTGP: the number of classes, and the float64 weights of the server's network."""

    outputs: int = 0
    learner: Arrays = field(default_factory=dict)


L = TypeVar("L", bound=LearnerOptions)


class Learner(ByClass[L, LearnerState]):
    """Trains a network at the server on the clients' mean representations, each used as an example of its class."""

    state_class = LearnerState
    vectors = "representation"

    @property
    def way_out(self) -> str:  # type: ignore[override]
        """Advice for clients whose representations have another width, for error messages."""
        return f"set {self.method.name}.width, to which all representations are then projected"

    @abstractmethod
    def network(self) -> nn.Module:
        """Build the server's network, with weights drawn from torch's global random generator."""

    def terms(self, means: Tensor, classes: Tensor) -> tuple[Loss, ...]:
        """Return the loss terms for mean representations (n, width) float64 and their `classes` (n,) int64.

        An empty tuple, the default, means the cross entropy of the network's outputs.
        """
        return ()

    def common(self, reply: Reply) -> Mapping[str, Common]:
        outputs = Common(reply.report.outputs, "all clients need an output for each of the same classes")
        return {**super().common(reply), "number of network outputs": outputs}

    def admit(self, reply: Reply) -> None:
        super().admit(reply)
        outputs, width = reply.report.outputs, self.state.width
        self.state.outputs = outputs
        if not 0 < outputs <= MOST_CLASSES:
            raise ModelError(f"the client's network has {outputs} outputs, but the server supports 1 to {MOST_CLASSES}")
        check_room(
            COPIES * 8 * width * max(width, outputs), "the server needs memory for the client's classes and width:"
        )
        if not self.state.learner:
            self.state.learner = to_arrays(self.learner().state_dict())

    def check_reply(self, reply: Reply) -> None:
        super().check_reply(reply)
        if reply.arrays["prototypes"]["classes"].max(initial=0) >= self.state.outputs:
            raise WireError(f"the client's prototypes have classes beyond {self.state.outputs - 1}, the last class")

    def learner(self) -> nn.Module:
        """Return the server's network with its current weights."""
        network = build_at_server(self.network, self.config.seed).double()
        load_into(network.state_dict(), self.state.learner)
        return network

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        sent = {client: reply.arrays["prototypes"] for client, reply in replies.items()}
        means = self.aggregator.clipped({client: {"means": arrays["means"]} for client, arrays in sent.items()})
        inputs = torch.from_numpy(np.concatenate([arrays["means"] for arrays in means.values()])).double()
        labels = torch.from_numpy(np.concatenate([arrays["classes"] for arrays in sent.values()]))
        keys, terms, examples = self.options, self.terms(inputs, labels), Examples(inputs, labels)
        steps = Optimisation(learning_rate=keys.server_learning_rate, batch_size=self.config.batch_size)
        phase = Phase(keys.server_epochs, steps, terms=terms, task_weight=0.0 if terms else 1.0)
        learner, seed = self.state.learner, self.config.seed
        self.state.learner, metrics = train_at_server(self.learner(), learner, phase, examples, seed, round)
        return metrics


class FedGH(Learner[FedGHOptions]):
    """Trains a linear head at the server, and sends it to the clients."""

    method = fedgh

    def network(self) -> nn.Module:
        return nn.Linear(self.state.width, self.state.outputs)

    def payload_for(self, client: str) -> Payload:
        return Payload({"head": cast(self.state.learner, self.config.wire_dtype)})


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
        return -torch.cdist(vectors, self.prototypes(), compute_mode="donot_use_mm_for_euclid_dist")


class FedTGP(Learner[FedTGPOptions]):
    """Trains global prototypes of all classes at the server, and sends them to the clients."""

    method = fedtgp

    def network(self) -> Prototypes:
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
        metrics = super().aggregate_fit(round, replies)
        network = self.learner()
        assert isinstance(network, Prototypes)
        means = to_arrays({"means": network.prototypes()}, "float32")
        self.state.prototypes = {"classes": np.arange(self.state.outputs), **means}
        return metrics

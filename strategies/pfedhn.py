"""pFedHN, server side: a hypernetwork generates each client's weights (Shamsian et al., ICML 2021, algorithm 1).

The hypernetwork phi is trained on the clients' updates: client i receives theta_i and its training changes them by
delta_i, so the gradient of phi is -(d theta_i / d phi)^T delta_i. The paper makes a step for each client; here a round
is one step, with the mean over its clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedhet.algorithms.hypernets.personal import PersonalHypernetwork
from fedhet.messages import Arrays, Payload, Reply, check, narrowed, to_arrays, to_tensor
from fedhet.methods.included import pfedhn
from fedhet.server import FederatedStrategy, State
from fedhet.training import eager
from fedhet.utils.machine import one_thread

WEIGHT_DECAY, CLIP = 0.001, 50.0
"""Weight decay of the hypernetwork, and the largest norm of its gradient, as in the authors' code."""


@dataclass
class PFedHNState(State):
    """`hypernetwork` are parameters by name, `moments` Adam's state by name and kind."""

    hypernetwork: Arrays = field(default_factory=dict)
    moments: Arrays = field(default_factory=dict)


class PFedHN(FederatedStrategy[pfedhn.PFedHNParameters, PFedHNState]):
    """Sends each client the weights that the hypernetwork generates for it."""

    method = pfedhn.method
    state_class = PFedHNState
    copies = 8  # weights, their gradients, and pieces of both

    def payload_for(self, client: str) -> Payload:
        """Return the weights generated for this client."""
        with torch.no_grad(), one_thread():
            written = self._hypernetwork().write(client, self._shapes(client))
        return Payload({"model": to_arrays(written, self.config.wire_dtype)})

    def check_reply(self, reply: Reply) -> None:
        """Check that the reply has a change of every weight."""
        spec = narrowed(self.federation.specs[reply.client], self.config.wire_dtype)
        check(reply.arrays.get("delta", {}), spec, "its change of weights")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Take a step of Adam; parameters of absent clients and architectures do not change.

        With a rule other than the mean, the rule aggregates the clients' gradients of the hypernetwork's parameters.
        """
        hypernetwork, plain = self._hypernetwork(), self.aggregator.plain
        tensors, gradients = hypernetwork.tensors, {}
        with one_thread():
            for client, reply in replies.items():
                written, share = hypernetwork.write(client, self._shapes(client)), len(replies) if plain else 1
                passed = [-to_tensor(reply.arrays["delta"][name]).float() / share for name in written]
                torch.autograd.backward(list(written.values()), passed)
                if not plain:
                    grads = {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}
                    gradients[client] = to_arrays(grads)
                    for name in grads:
                        tensors[name].grad = None
            for name, gradient in (self.aggregator.average_arrays(gradients) if gradients else {}).items():
                tensors[name].grad = to_tensor(gradient)
            optimizer = self._optimizer(tensors)
            torch.nn.utils.clip_grad_norm_(tensors.values(), CLIP)
            optimizer.step()
        self.state.hypernetwork = to_arrays(tensors)
        self.state.moments = to_arrays(
            {f"{name}:{kind}": value for name, p in tensors.items() for kind, value in optimizer.state[p].items()}
        )
        return {}

    def _hypernetwork(self) -> PersonalHypernetwork:
        """Return the current hypernetwork; it draws missing parameters when they are needed."""
        tensors = {name: to_tensor(array).requires_grad_() for name, array in self.state.hypernetwork.items()}
        embedding = next(
            (tensor.shape[1] for name, tensor in tensors.items() if name.startswith("embedding/")),
            1 + len(self.state.clients) // 4,
        )
        return PersonalHypernetwork(tensors, self.config.seed, embedding)

    def _optimizer(self, tensors: Mapping[str, Tensor]) -> torch.optim.Adam:
        """Return Adam with its last state."""
        rate = self.parameters.server_learning_rate
        optimizer = eager(torch.optim.Adam)(tensors.values(), lr=rate, weight_decay=WEIGHT_DECAY)
        for key, array in self.state.moments.items():
            name, _, kind = key.rpartition(":")
            optimizer.state[tensors[name]][kind] = to_tensor(array)
        return optimizer

    def _shapes(self, client: str) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, (shape, _) in self.federation.specs[client].items()}

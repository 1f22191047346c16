"""pFedHN (Shamsian et al., ICML 2021, algorithm 1): a hypernetwork h at the server generates each client's weights.

    server:    theta_i = h(i; phi)
    client i:  delta_i = its change of theta_i in training
    server:    one step of Adam for phi with the gradient -mean_i (d theta_i / d phi)^T delta_i

The paper takes a step for each client.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedhet.algorithms.hypernets.personal import PersonalHypernetwork, begin_of
from fedhet.messages import Arrays, Payload, Reply, check, to_arrays, to_tensor
from fedhet.methods.sharing import TRAINED
from fedhet.server import STRUCTURE, ArraysBy, FederatedStrategy, Options, State, Traits, method, option
from fedhet.training import eager
from fedhet.utils.process import standard_settings

WEIGHT_DECAY = 0.001
"""Weight decay of the hypernetwork, from the authors' code."""

CLIP = 50.0
"""Largest norm of the hypernetwork's gradient, from the authors' code."""


@dataclass(frozen=True)
class Keys(Options):
    without = ("start-from",)  # The hypernetwork generates the weights.

    server_learning_rate: float = option(0.01, "learning rate of the hypernetwork's Adam", above=0)


@dataclass
class Hypernetwork(State):
    """The state of pFedHN: the parameters of the `hypernetwork`, and Adam's `moments` ("NAME:exp_avg", ...).

    A client gets the hypernetwork's output * scale + offset; `starts` has [offset, scale] by client and array.
    """

    hypernetwork: Arrays = field(default_factory=dict)
    moments: Arrays = field(default_factory=dict)
    starts: ArraysBy = field(default_factory=dict)


@method(
    "pfedhn",
    Traits(
        shares=replace(TRAINED, averaged=False, units=None),
        other_arrays="entries",
        sends={"delta": "weights", "starts": STRUCTURE},
        inside="",
    ),
    Keys,
    client="fedhet.client_apps.pfedhn:PFedHN",
    common={
        "learning-rate": 0.005,
        "momentum": 0.9,
        "weight-decay": 5e-5,
        "batch-size": 64,
        "batch-norm": "re-estimate",
    },
)
class PFedHN(FederatedStrategy[Keys, Hypernetwork]):
    """pFedHN: a hypernetwork at the server, which generates each client's weights and learns from their changes."""

    copies = 8  # Weights, their gradients, and pieces of both are in memory.

    def admit(self, reply: Reply) -> None:
        starts = reply.arrays.get("starts", {})
        spec = self.federation.specs.get(reply.client, reply.report.spec)
        check(starts, dict.fromkeys(starts.keys() & spec.keys(), ((2,), "float32")), "the client's offsets and scales")
        if starts:
            self.state.starts = self.state.starts | {reply.client: starts}

    def payload_for(self, client: str) -> Payload:
        with standard_settings(), torch.no_grad():
            written = self._written(self._hypernetwork(), client)
        return Payload({"model": to_arrays(written)})

    def check_reply(self, reply: Reply) -> None:
        check(reply.arrays.get("delta", {}), self.federation.specs[reply.client], "the client's change of weights")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        hypernetwork = self._hypernetwork()
        tensors = hypernetwork.tensors
        gradients = {}
        plain = self.aggregator.plain
        deltas: Mapping[str, Arrays] = {client: reply.arrays["delta"] for client, reply in replies.items()}
        if plain:
            # A scale that a client sent is a factor of its gradient.
            deltas = self.aggregator.clipped(deltas, scales={client: self._scales(client) for client in deltas})
        with standard_settings():
            for client, delta in deltas.items():
                written = self._written(hypernetwork, client)
                share = len(replies) if plain else 1
                passed = [-to_tensor(delta[name]).float() / share for name in written]
                torch.autograd.backward(list(written.values()), passed)
                if not plain:
                    grads = {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}
                    gradients[client] = to_arrays(grads)
                    for name in grads:
                        tensors[name].grad = None
            for name, gradient in self.aggregator.average(gradients, before={}).items():
                having = sum(name in arrays for arrays in gradients.values())
                tensors[name].grad = to_tensor(gradient) * (having / len(replies))
            rate = self.options.server_learning_rate
            optimizer = eager(torch.optim.Adam)(tensors.values(), lr=rate, weight_decay=WEIGHT_DECAY)
            for key, array in self.state.moments.items():
                name, _, kind = key.rpartition(":")
                optimizer.state[tensors[name]][kind] = to_tensor(array)
            torch.nn.utils.clip_grad_norm_(tensors.values(), CLIP)
            optimizer.step()
        self.state.hypernetwork = to_arrays(tensors)
        self.state.moments = to_arrays(
            {f"{name}:{kind}": value for name, p in tensors.items() for kind, value in optimizer.state[p].items()}
        )
        return {}

    def _hypernetwork(self) -> PersonalHypernetwork:
        tensors = {name: to_tensor(array).requires_grad_() for name, array in self.state.hypernetwork.items()}
        embedding = next(
            (tensor.shape[1] for name, tensor in tensors.items() if name.startswith("embedding/")),
            1 + len(self.state.clients) // 4,
        )
        return PersonalHypernetwork(tensors, self.config.seed, embedding)

    def _scales(self, client: str) -> dict[str, float]:
        starts = self.state.starts.get(client, {})
        shapes = {name: shape for name, (shape, _) in self.federation.specs[client].items()}
        return {n: float(starts[n][1]) if n in starts else begin_of(n, shape)[1] for n, shape in shapes.items()}

    def _written(self, hypernetwork: PersonalHypernetwork, client: str) -> dict[str, Tensor]:
        shapes = {name: shape for name, (shape, _) in self.federation.specs[client].items()}
        starts = {name: array.tolist() for name, array in self.state.starts.get(client, {}).items()}
        return hypernetwork.write(client, shapes, starts)

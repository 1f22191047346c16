"""Strategies of FLHA-GHN and pFedHN: hypernetworks generate the clients' weights.

FLHA-GHN (Litany et al., 2022, algorithm 1) averages a graph hypernetwork, which clients train. pFedHN (Shamsian et al.,
ICML 2021, algorithm 1) trains a hypernetwork at the server, with parameters phi: client i receives the weights theta_i
and changes them by delta_i in training, so the gradient of phi is -(d theta_i / d phi)^T delta_i. The paper
takes a step for each client; here, a round is one step with the mean gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256

import torch
from torch import Tensor

from fedhet.algorithms.hypernets.design import start
from fedhet.algorithms.hypernets.personal import PersonalHypernetwork, begin_of
from fedhet.messages import Arrays, Payload, Reply, Spec, WireError, check, to_arrays, to_tensor
from fedhet.methods.included.hypernetworks import FLHAGHNOptions, PFedHNOptions, flha_ghn, pfedhn
from fedhet.server import ArraysBy, Common, FederatedStrategy, State
from fedhet.training import eager
from fedhet.utils.process import standard_settings


class FLHAGHN(FederatedStrategy[FLHAGHNOptions, State]):
    """FLHA-GHN: the unweighted mean of clients' hypernetworks, unless another aggregation rule is configured."""

    method = flha_ghn
    copies = 4  # the state, the sum, and a message

    def common(self, reply: Reply) -> Mapping[str, Common]:
        digest = sha256(repr(sorted(reply.report.spec.items())).encode()).hexdigest()[:12]
        return {"digest of the hypernetwork's arrays": Common(digest, "all clients need the same version of fedhet")}

    def first_arrays(self, missing: Spec) -> Arrays:
        try:
            drawn = partial(start, seed=self.config.seed, normalise=self.options.normalise)
            return to_arrays({key: drawn(key, shape) for key, (shape, _) in missing.items()})
        except ValueError as error:
            raise WireError(str(error)) from error

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        models = {client: reply.arrays["model"] for client, reply in replies.items()}
        self.state.model = self.state.model | self.aggregator.average(models)
        return {}


WEIGHT_DECAY, CLIP = 0.001, 50.0  # of the hypernetwork; CLIP is its gradient's largest norm; from the authors' code


@dataclass
class PFedHNState(State):
    """The state of pFedHN: the parameters of the `hypernetwork`, and Adam's `moments` ("NAME:exp_avg", ...).

    A client gets the hypernetwork's output * scale + offset; `starts` has [offset, scale] by client and array.
    """

    hypernetwork: Arrays = field(default_factory=dict)
    moments: Arrays = field(default_factory=dict)
    starts: ArraysBy = field(default_factory=dict)


class PFedHN(FederatedStrategy[PFedHNOptions, PFedHNState]):
    """pFedHN: a hypernetwork at the server, which generates each client's weights and learns from their changes."""

    method = pfedhn
    copies = 8  # weights, their gradients, and pieces of both

    def admit(self, reply: Reply) -> None:
        starts, known = reply.arrays.get("starts", {}), self.federation.specs.get(reply.client, reply.report.spec)
        check(starts, dict.fromkeys(starts.keys() & known.keys(), ((2,), "float32")), "the client's offsets and scales")
        if starts:
            self.state.starts = self.state.starts | {reply.client: starts}

    def payload_for(self, client: str) -> Payload:
        with standard_settings(), torch.no_grad():
            written = self._written(self._hypernetwork(), client)
        return Payload({"model": to_arrays(written)})

    def check_reply(self, reply: Reply) -> None:
        check(reply.arrays.get("delta", {}), self.federation.specs[reply.client], "the client's change of weights")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        hypernetwork, plain = self._hypernetwork(), self.aggregator.plain
        tensors, gradients = hypernetwork.tensors, {}
        deltas: Mapping[str, Arrays] = {client: reply.arrays["delta"] for client, reply in replies.items()}
        if plain:  # a scale that a client sent is a factor of its gradient
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
        sent, spec = self.state.starts.get(client, {}), self.federation.specs[client]
        return {name: float(sent[name][1]) if name in sent else begin_of(name, spec[name][0])[1] for name in spec}

    def _written(self, hypernetwork: PersonalHypernetwork, client: str) -> dict[str, Tensor]:
        shapes = {name: shape for name, (shape, _) in self.federation.specs[client].items()}
        starts = {name: array.tolist() for name, array in self.state.starts.get(client, {}).items()}
        return hypernetwork.write(client, shapes, starts)

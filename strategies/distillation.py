"""Strategies of FedMD, FedDF, FedKD and FLHA-distillation: networks learn from each other's outputs.

In round t of FedMD (Li and Wang, 2019, algorithm 1), a client learns the mean class scores of public examples X(t),
trains on its own examples, and returns its scores of X(t+1). In FedDF (Lin et al., 2020), the server trains a network
w with Adam on KL(softmax(1/m sum_k f_k(x)) || softmax(f_w(x))), where f_k(x) are the logits of m clients.

FedKD (Wu et al., 2022) averages the changes of a small network, sent as low-rank factors: clients that trained in the
last round receive the last change, others the whole network. In FLHA-distillation, a teacher is trained by FedAvg, and
then sent to each client to learn from.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedhet import models
from fedhet.algorithms.alignment.targets import pack, unpack
from fedhet.data import Examples
from fedhet.errors import FedhetError
from fedhet.messages import Arrays, Payload, Reply, WireError, load_into, to_arrays
from fedhet.messages.payload import add_factors, from_factors, to_factors
from fedhet.methods.included import distillation as declared
from fedhet.models.representation import precision
from fedhet.server import Common, FederatedStrategy, State, in_order
from fedhet.setup import client_setup
from fedhet.training import Optimisation, Phase, Step, learning_rate, read, soft_divergence
from fedhet.utils.machine import device_of
from fedhet.utils.process import standard_settings

from .families.at_server import build_at_server, train_at_server
from .families.by_class import outputs_of
from .fedhenn import distance_metric, packed_rows, public_rows


@dataclass
class ScoresState(State):
    """The state of a method that exchanges scores of public examples; `classes` is the number of classes.

    `mean` has the scores for clients to learn in round `mean_round` (0: none yet), in the format of `pack`.
    """

    mean: Arrays = field(default_factory=dict)
    mean_round: int = 0
    classes: int = 0


Q = TypeVar("Q", bound=declared.ScoresOptions)
T = TypeVar("T", bound=ScoresState)


class Scores(FederatedStrategy[Q, T]):
    """Base class of strategies that receive class scores of public examples, and send scores for clients to learn."""

    def common(self, reply: Reply) -> Mapping[str, Common]:
        return {"number of classes": Common(outputs_of(reply), "all clients need the same classes")}

    def admit(self, reply: Reply) -> None:
        self.state.classes = outputs_of(reply)

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        state, common = self.state, Payload()
        if state.mean_round:
            common.arrays["rows"] = {"rows": self.rows(state.mean_round)}
            common.arrays["mean"] = state.mean
        if self._sent_in(round):
            common.arrays["next-rows"] = {"rows": self.rows(round + 1)}
        return dict.fromkeys(clients, common)

    def check_reply(self, reply: Reply) -> None:
        reply.values.number("distance", 0.0)
        if not self._sent_in(self.state.round + 1):
            return
        scores = packed_rows(reply, "scores")
        expected = (len(self.rows(1)), self.state.classes)
        if scores.shape != expected:
            raise WireError(
                f"the client's scores have shape {list(scores.shape)}, expected {list(expected)}: "
                "use the server's public dataset and version of fedhet"
            )

    def rows(self, round: int) -> np.ndarray[Any, Any]:
        """Return the indices of the public examples of a round, drawn at random from the seed."""
        return public_rows(self.config.seed, "subset", round, self.state.public_size, self.options.subset)

    def _sent_in(self, round: int) -> bool:
        return True

    def mean(self, replies: Mapping[str, Reply]) -> Tensor:
        """Return the mean of the clients' scores, (n, C) for n public examples and C classes."""
        return torch.stack([unpack(reply.arrays["scores"]) for reply in replies.values()]).double().mean(0).float()

    def teach(self, round: int, scores: Tensor) -> None:
        """Store class scores (n, C) of the n public examples of round `round + 1`, in which clients learn them."""
        self.state.mean, self.state.mean_round = pack(scores), round + 1


class FedMD(Scores[declared.FedMDOptions, ScoresState]):
    """FedMD: clients learn the mean of their class scores of public examples (Li and Wang, 2019, algorithm 1)."""

    method = declared.fedmd

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        if self._sent_in(round):
            self.teach(round, self.mean(replies))
        return distance_metric(replies.values(), "distance")

    def _sent_in(self, round: int) -> bool:
        return round != self.run.last_round


@dataclass
class FedDFState(ScoresState):
    """The state of FedDF: the `shape` of an input of the server's network, and whether it consists of `integers`."""

    serves = True
    shape: list[int] = field(default_factory=list)
    integers: bool = False


class FedDF(Scores[declared.FedDFOptions, FedDFState]):
    """FedDF: the global model learns the mean of clients' logits; if `teach = true`, clients then learn its logits."""

    method = declared.feddf

    @property
    def public(self) -> Tensor:
        """The inputs of the public dataset; raises a FedhetError if only the clients have it."""
        if self.run.public is None:
            raise FedhetError("feddf's server needs public data: set public-samples, or make_server_app(public=...)")
        return self.run.public.inputs

    def admit(self, reply: Reply) -> None:
        super().admit(reply)
        state, own_data = self.state, self.run.own_data or reply.report.own_data
        if not state.model:
            example = self._transform(None, own_data=own_data)(self.public[:1])
            state.shape, state.integers = [*example.shape[1:]], not example.is_floating_point()
            state.model = to_arrays(self.network().state_dict())

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        network, device = self.network(), device_of("cpu" if self.config.device == "cpu" else "auto")
        network.to(device)
        inputs = self.public[torch.from_numpy(self.rows(round + 1)).long()].to(device)
        examples = Examples(inputs, self.mean(replies).to(device))
        transform = self._transform(network, own_data=self.run.own_data)
        keys, many_labels = self.options, self.run.metric == "auc"
        rate = keys.server_learning_rate
        schedule = partial(learning_rate, "cosine", rate)
        steps = Optimisation("adam", rate, batch_size=keys.public_batch, schedule=schedule)

        def divergence(step: Step) -> Tensor:
            return soft_divergence(step.outputs, step.labels.to(step.outputs.dtype), 1.0, many_labels=many_labels)

        phase = Phase(0, steps, steps=keys.server_steps, terms=(divergence,), task_weight=0.0)
        state, seed = self.state, self.config.seed
        state.model, trained = train_at_server(network, state.model, phase, examples, seed, round, transform)
        if self.options.teach and trained:
            with standard_settings():
                self.teach(round, read(network, inputs, transform).cpu())
        return distance_metric(replies.values(), "distance") | trained

    def global_model(self) -> nn.Module | None:
        return self.network() if self.has_global_model else None

    def network(self) -> nn.Module:
        dtype = torch.int64 if self.state.integers else torch.float32
        name, example = self.options.server_model, torch.zeros(1, *self.state.shape, dtype=dtype)
        build = partial(models.build_auxiliary, name, self.config.architectures, example, self.state.classes)
        network = build_at_server(build, self.config.seed)
        load_into(network.state_dict(), self.state.model)
        return network

    def _transform(self, network: nn.Module | None, *, own_data: bool) -> Callable[[Tensor], Tensor]:
        dataset = None if own_data else client_setup.dataset_of(self.config)
        return client_setup.transform_of(dataset, None if network is None else precision(network))


@dataclass
class FedKDState(State):
    """The state of FedKD: the shared network's last change (`update`), and clients that need only this (`holding`)."""

    update: Arrays = field(default_factory=dict)
    holding: list[str] = field(default_factory=list)


class FedKD(FederatedStrategy[declared.AuxiliaryOptions, FedKDState]):
    """FedKD: the average of the changes of a small shared network; the clients' own networks are not sent."""

    method = declared.fedkd

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        change = Payload({"model": self.state.update}, {"change": True})
        return {client: change if client in self.state.holding else self.payload_for(client) for client in clients}

    def evaluation_payloads(self, clients: Sequence[str], *, amid_training: bool) -> dict[str, Payload]:
        return {client: Payload() for client in clients}

    def check_reply(self, reply: Reply) -> None:
        """Convert the low-rank `update` in a reply to weights; only a client that lost its state may leave it out."""
        if "update" in reply.arrays:
            spec, update = self.federation.specs[reply.client], reply.arrays["update"]
            reply.arrays["update"] = from_factors(update, self.state.model, spec, "the client's update")
        elif reply.client not in self.state.holding or reply.report.lost_state < 0:
            raise WireError("the client's reply lacks 'update', the shared network's change: check the client's mods")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        state = self.state
        models = {client: reply.arrays["update"] for client, reply in replies.items() if "update" in reply.arrays}
        state.holding = list(models)
        if models:
            mean = self.aggregator.average(models, self.aggregator.weights(replies))
            spec = self.federation.specs[state.holding[0]]
            state.update = to_factors(mean, state.model, declared.energy(round, self.config.rounds))
            state.model = add_factors(state.update, state.model, spec)
        return {}


@dataclass
class FLHADistillationState(State):
    """The state of FLHA-distillation: `taught` lists the clients that have received the final teacher."""

    taught: list[str] = field(default_factory=list)


class FLHADistillation(FederatedStrategy[declared.FLHADistillationOptions, FLHADistillationState]):
    """FLHA-distillation: clients train a teacher by FedAvg in the first rounds, and distil it in the others."""

    method = declared.flha_distillation

    @property
    def teaching(self) -> bool:
        return self.state.round < self.options.teaching(self.config.rounds)

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        taught = () if self.teaching else self.state.taught
        return {client: Payload() if client in taught else self.payload_for(client) for client in clients}

    def evaluation_payloads(self, clients: Sequence[str], *, amid_training: bool) -> dict[str, Payload]:
        return {client: self.payload_for(client) if self.teaching else Payload() for client in clients}

    def check_reply(self, reply: Reply) -> None:
        if self.teaching:
            super().check_reply(reply)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        if self.teaching:
            return super().aggregate_fit(round, replies)
        taught = {*self.state.taught}
        lost = {client for client in taught & replies.keys() if replies[client].report.lost_state >= 0}
        self.state.taught = in_order(taught - lost | (replies.keys() - taught))
        return {}

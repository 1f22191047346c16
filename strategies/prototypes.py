"""Strategies of FedProto, FD, FedGH, FedTGP and FedGen.

FedProto (Tan et al., AAAI 2022, equation 6) averages prototypes, the clients' mean representations of each class. In FD
(Jeong et al., 2018, algorithm 1), each client receives the mean logits of the other clients. FedGH (Yi et al., ACM MM
2023) trains a head on the prototypes. FedTGP (Zhang et al., AAAI 2024) trains global prototypes

    P_c = F(v_c)                                                     for class c, with embedding v_c and small network F
    L = -log( exp(-(|p - P_y| + d)) / (exp(-(|p - P_y| + d)) + sum_{c != y} exp(-|p - P_c|)) )

where p is a client's prototype of class y, and the margin d is the largest distance between the mean prototypes of two
classes, but at most tau. In FedGen (Zhu et al., ICML 2021), a generator G learns representations on which the clients'
heads h_i agree, from noise e and class y of each example j, drawn in proportion to the clients' examples:

    L = CE(mean_i h_i(G(e, y)), y) + b exp(-mean_{j, k} |e_j - e_k|^2 |G_j - G_k|)     equation 4, with `diversity` as b

The mean score of linear heads is the score of the averaged head, which clients receive with the generator.
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
from fedhet.messages import Arrays, Payload, Reply, WireError, check, check_room, load_into, to_arrays
from fedhet.methods.included import prototypes as declared
from fedhet.methods.options import Options
from fedhet.models.networks import Generator, draw
from fedhet.server import ArraysBy, Common, FederatedStrategy, State, in_order
from fedhet.server.claims import limited
from fedhet.training import Loss, Optimisation, Phase, Step
from fedhet.utils.randomness import torch_generator

from ._common import MOST_CLASSES, build_at_server, class_counts, class_means, outputs_of, train_at_server


@dataclass
class ClassState(State):
    """The state of a method whose clients send a vector (mean representation or output) for each class they have.

    `prototypes` has vectors `means` (k, `width`) of `classes` (k,), which are numbers from 0 to `outputs` - 1.
    """

    width: int = 0
    outputs: int = MOST_CLASSES
    prototypes: Arrays = field(default_factory=dict)


P = TypeVar("P", bound=Options)
C = TypeVar("C", bound=ClassState)


class ByClass(FederatedStrategy[P, C]):
    """Base class of strategies that average the vectors which clients send for each class."""

    def payload_for(self, client: str) -> Payload:
        return Payload({"prototypes": self.state.prototypes} if self.state.prototypes else {})

    def common(self, reply: Reply) -> Mapping[str, Common]:
        remedy = f"set {self.method.name}.width, to which all representations are then projected"
        return {"representation width": Common(_width(reply), remedy)}

    def admit(self, reply: Reply) -> None:
        self.state.width = _width(reply)

    def check_reply(self, reply: Reply) -> None:
        arrays = reply.arrays.get("prototypes", {})
        k = arrays["classes"].size if "classes" in arrays else 0
        expected = {"means": ((k, self.state.width), "float32"), "classes": ((k,), "int64"), "counts": ((k,), "int64")}
        check(arrays, expected, "the client's prototypes")
        classes, last = arrays["classes"], self.state.outputs - 1
        if k and (classes.min() < 0 or classes.max() > last or len(set(classes)) < k):
            raise WireError(f"the client's prototypes must have distinct classes from 0 to {last}: check its labels")
        if arrays["counts"].min(initial=1) < 1 or arrays["counts"].sum(dtype=float) > reply.examples:
            raise WireError(
                f"the client's prototypes must have positive numbers of examples, in total at most {reply.examples}: "
                "check the client's mods"
            )

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        vectors = self.bounded(replies) if self.config.aggregation == "mean" else [self.combined(replies)]
        self.state.prototypes = class_means(vectors, self.state.prototypes)
        return {}

    def bounded(self, replies: Mapping[str, Reply]) -> list[Arrays]:
        """Return each client's `classes` (k,), `means` (k, width) clipped by `clip-norm`, and weights `counts` (k,)."""
        sent = {client: reply.arrays["prototypes"] for client, reply in replies.items()}
        means = self.aggregator.clipped({client: {"means": arrays["means"]} for client, arrays in sent.items()})
        weights = self.aggregator.weights(replies)
        shares = {client: weights[client] / replies[client].examples for client in weights}
        return [a | means[c] | {"counts": a["counts"] * shares[c]} for c, a in sent.items()]

    def combined(self, replies: Mapping[str, Reply]) -> Arrays:
        """Return `classes` (k,), their mean vectors `means` by the rule `aggregation`, and weights `counts` of 1."""
        sent = {client: reply.arrays["prototypes"] for client, reply in replies.items()}
        by_class = {
            client: dict(zip(map(str, arrays["classes"]), arrays["means"], strict=True))
            for client, arrays in sent.items()
        }
        averages = self.aggregator.average(by_class, before={})
        classes = np.array(sorted(map(int, averages)), np.int64)
        means = np.array([averages[str(number)] for number in classes], np.float32)
        return {"classes": classes, "means": means.reshape(-1, self.state.width), "counts": np.ones_like(classes)}


def _width(reply: Reply) -> int:
    return reply.values.count("width", at_least=1, at_most=MOST_CLASSES)


class FedProto(ByClass[declared.FedProtoOptions, ClassState]):
    """FedProto: the average of the clients' prototypes (mean representations) of each class."""

    method = declared.fedproto


@dataclass
class FDState(ClassState):
    """The state of FD: `own` has, by client, the latest mean logits of each class."""

    own: ArraysBy = field(default_factory=dict)


class FD(ByClass[declared.FDOptions, FDState]):
    """FD: sends each client the unweighted mean logits of each class over the other clients that have the class."""

    method = declared.fd

    def common(self, reply: Reply) -> Mapping[str, Common]:
        return {"prediction width": Common(_width(reply), "all clients need the same classes")}

    def payload_for(self, client: str) -> Payload:
        peers = {peer: self.state.own[peer] for peer in in_order(self.state.own) if peer != client}
        if not peers:
            return Payload()
        vectors = [arrays | {"counts": np.ones(len(arrays["classes"]))} for arrays in peers.values()]
        return Payload({"prototypes": class_means(vectors, {})})

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        self.state.own |= {client: reply.arrays["prototypes"] for client, reply in replies.items()}
        return {}


COPIES = 8  # of the server's network, for which it needs memory: weights, gradients, optimizer, states


@dataclass
class LearnerState(ClassState):
    """The state of FedGH and FedTGP: `learner` has the float64 weights of the server's network."""

    learner: Arrays = field(default_factory=dict)


L = TypeVar("L", bound=declared.LearnerOptions)


class Learner(ByClass[L, LearnerState]):
    """Base class of strategies that train a network on the clients' mean representations; each mean is an example."""

    @abstractmethod
    def network(self) -> nn.Module:
        """Return a new network for the server, with weights drawn from torch's global random generator."""

    def terms(self, means: Tensor, classes: Tensor) -> tuple[Loss, ...]:
        """Return losses to train on mean representations `means` (n, width) of `classes` (n,); () for cross entropy."""
        return ()

    def common(self, reply: Reply) -> Mapping[str, Common]:
        outputs = Common(outputs_of(reply), "all clients need an output for each of the same classes")
        return {**super().common(reply), "number of network outputs": outputs}

    def admit(self, reply: Reply) -> None:
        super().admit(reply)
        self.state.outputs, width = outputs_of(reply), self.state.width
        size = COPIES * 8 * width * max(width, self.state.outputs)
        check_room(size, "the server needs memory for the client's classes and width:")
        if not self.state.learner:
            self.state.learner = to_arrays(self.learner().state_dict())

    def learner(self) -> nn.Module:
        network = build_at_server(self.network, self.config.seed).double()
        load_into(network.state_dict(), self.state.learner)
        return network

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        sent = self.bounded(replies)
        inputs = torch.from_numpy(np.concatenate([arrays["means"] for arrays in sent])).double()
        labels = torch.from_numpy(np.concatenate([arrays["classes"] for arrays in sent]))
        keys, terms, examples = self.options, self.terms(inputs, labels), Examples(inputs, labels)
        steps = Optimisation(learning_rate=keys.server_learning_rate, batch_size=self.config.batch_size)
        phase = Phase(keys.server_epochs, steps, terms=terms, task_weight=0.0 if terms else 1.0)
        learner, seed = self.state.learner, self.config.seed
        self.state.learner, metrics = train_at_server(self.learner(), learner, phase, examples, seed, round)
        return metrics


class FedGH(Learner[declared.LearnerOptions]):
    """FedGH: a linear head for all clients, which the server trains on their mean representations of classes."""

    method = declared.fedgh

    def network(self) -> nn.Module:
        return nn.Linear(self.state.width, self.state.outputs)

    def payload_for(self, client: str) -> Payload:
        return Payload({"head": {name: array.astype(np.float32) for name, array in self.state.learner.items()}})


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


class FedTGP(Learner[declared.FedTGPOptions]):
    """FedTGP: global prototypes of all classes, which the server trains on the clients' prototypes."""

    method = declared.fedtgp

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


@dataclass
class FedGenState(State):
    """The state of FedGen: `classes` has each client's class counts, `generator` the generator's float64 weights."""

    classes: ArraysBy = field(default_factory=dict)
    generator: Arrays = field(default_factory=dict)


class FedGen(FederatedStrategy[declared.FedGenOptions, FedGenState]):
    """FedGen: the average of the clients' heads, and a generator of representations trained on the mean head."""

    method = declared.fedgen

    def admit(self, reply: Reply) -> None:
        shape, _ = reply.report.spec.get("head.weight", ((), ""))
        if len(shape) != 2 or max(shape) > MOST_CLASSES:
            raise ModelError(f"the client's head.weight has shape {shape}, but must be (classes, width): use nn.Linear")
        self.state.classes[reply.client] = {"counts": class_counts(reply, shape[0])}

    @property
    def counts(self) -> Tensor:
        claims = {client: float(arrays["counts"].sum()) for client, arrays in self.state.classes.items()}
        most = limited(self.config, claims)
        shares = {client: most[client] / claim for client, claim in claims.items()}
        counts = [np.rint(arrays["counts"] * shares[c]) for c, arrays in self.state.classes.items()]
        return torch.from_numpy(np.sum(counts, 0).astype(np.int64))

    def payload_for(self, client: str) -> Payload:
        payload = super().payload_for(client)
        if self.state.generator:
            _, dtype = self.federation.specs[client]["head.weight"]
            arrays = self.state.generator.items()
            payload.arrays["generator"] = {n: a.astype(dtype) if a.dtype.kind == "f" else a for n, a in arrays}
            payload.arrays["classes"] = {"counts": self.counts.numpy()}
        return payload

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        metrics, keys = super().aggregate_fit(round, replies), self.options
        head = {name: torch.from_numpy(self.state.model[f"head.{name}"]).double() for name in ("weight", "bias")}
        generator = build_at_server(lambda: Generator(*head["weight"].shape), self.config.seed).double()
        batch = max(self.config.batch_size, 2)  # which BatchNorm needs
        stream = torch_generator(self.config.seed, "noise", round)
        drawn = draw(self.counts, keys.server_steps * batch, stream, torch.float64)

        def loss(step: Step) -> Tensor:
            agreed = F.cross_entropy(F.linear(step.outputs, head["weight"], head["bias"]), step.labels)
            return agreed + keys.diversity * alike(step.inputs[:, :-1], step.outputs)

        steps = Optimisation("adam", keys.server_learning_rate, batch_size=batch)
        phase = Phase(1, steps, terms=(loss,), task_weight=0.0)
        examples, weights = Examples(drawn, drawn[:, -1].long()), self.state.generator
        self.state.generator, trained = train_at_server(generator, weights, phase, examples, self.config.seed, round)
        return metrics | trained


def alike(noise: Tensor, outputs: Tensor) -> Tensor:
    """Return FedGen's diversity loss of the generator's outputs (n, d) for noise (n, e): small if outputs differ."""
    apart = torch.cdist(noise, noise, compute_mode="donot_use_mm_for_euclid_dist").square() / noise.shape[1]
    return (-apart * torch.cdist(outputs, outputs, p=1) / outputs.shape[1]).mean().exp()

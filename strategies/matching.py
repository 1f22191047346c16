"""Strategies of PFNM and FedMA, which match hidden units of the clients' networks.

Matching finds, for each hidden unit of a client, the global unit to average it with. A group is a set of hidden units
that must be permuted together; in a plain network, the units of one layer. PFNM (Yurochkin et al., ICML 2019) matches
all groups in one round.

FedMA (Wang et al., ICLR 2020, algorithm 1) matches one group per round and averages the output layer in the last round
of a pass. In round n of a pass, clients send group n, with its inputs in the global order. The next message returns the
matched group and each client's assignment (the global unit of each local unit), and clients train the later layers. A
further pass starts from local models that clients extract from the global model. A client that misses a round
takes part again in the next pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np
from torch import nn

from fedhet.algorithms.graphs import PermutationGroups, resize, widths_of
from fedhet.algorithms.matching.groups import (
    Matching,
    assemble,
    average_rest,
    due,
    groups_to_json,
    match_group,
    match_networks,
)
from fedhet.errors import FedhetError
from fedhet.messages import Arrays, Payload, Reply, WireError, check
from fedhet.methods.included.matching import FedMAOptions, PFNMOptions, fedma, pfnm
from fedhet.server import ArraysBy, Common, FederatedStrategy, State, in_order
from fedhet.server.submodel import described, read_network
from fedhet.utils.randomness import derive_seed
from fedhet.utils.text import log

from .families.by_class import class_counts


@dataclass
class MatchedState(State):
    """The state of a method that matches hidden units.

    Attributes:
        groups: the sets of hidden units that must be permuted together in the clients' networks, as JSON.
        classes: whether labels are classes; None before the first client is admitted.
        assignments: by client and group, the index in the global model of each of the client's units.
    """

    groups: str = ""
    classes: bool | None = None
    assignments: ArraysBy = field(default_factory=dict)


M = TypeVar("M", bound=PFNMOptions)
T = TypeVar("T", bound=MatchedState)


class MatchedStrategy(FederatedStrategy[M, T]):
    """Base class of PFNM and FedMA, whose global model has matched units and is wider than the clients' networks."""

    def common(self, reply: Reply) -> Mapping[str, Common]:
        groups = described(reply.values.text("groups", longest=2**20), reply.report.spec, complete=True)
        if not groups.fixed:
            raise WireError("the client's network has no output layer: end the network with a linear layer")
        equal = self.config.shared_init
        digest = sha256(groups_to_json(groups if equal else groups.with_widths([1] * len(groups))).encode()).hexdigest()
        remedy = "all clients need one architecture" + " in equal widths, or shared-init = false" * equal
        kind = "classes" if reply.values.flag("classes") else "numbers"
        return {
            "digest of layers and connections": Common(digest[:12], remedy),
            "kind of labels": Common(kind, "all clients need the same task"),
        }

    def admit(self, reply: Reply) -> None:
        if (state := self.state).classes is None:
            state.groups, state.classes = reply.values.text("groups", longest=2**20), reply.values.flag("classes")

    @property
    def groups(self) -> PermutationGroups:
        return read_network(self.state.groups)

    def widths(self, client: str) -> tuple[int, ...]:
        return widths_of({name: shape for name, (shape, _) in self.federation.specs[client].items()}, self.groups)

    def fits(self, client: str) -> bool:
        """Return whether a client can start from the global model: its network is at most as wide in all layers."""
        shapes = {name: array.shape for name, array in self.state.model.items()}
        return all(n <= size for n, size in zip(self.widths(client), widths_of(shapes, self.groups), strict=True))

    def matching(self) -> Matching:
        return Matching(**{each.name: getattr(self.options, each.name) for each in fields(PFNMOptions)})

    def check_classes(self, reply: Reply) -> None:
        if self.state.classes:
            class_counts(reply, self.federation.specs[reply.client][self.groups.fixed[-1]][0][0])

    def average_rest(
        self,
        states: Sequence[Arrays],
        replies: Mapping[str, Reply],
        assignments: Sequence[Mapping[int, Any]],
        sizes: Sequence[int],
    ) -> Arrays:
        """Return the average of the arrays that are not matched, such as the output layer.

        `states` has each client's arrays, and `assignments` the global index of each unit, by index of the layer; both
        are in the order of `replies`. `sizes` has the global model's number of units in each layer.
        """
        counts = [reply.arrays["classes"]["counts"] * reply.counted for reply in replies.values() if self.state.classes]
        return average_rest(
            states,
            self.groups,
            examples=[*self.aggregator.weights(replies).values()],
            class_counts=counts or None,
            assignments=assignments,
            sizes=sizes,
            statistics=self.config.batch_norm == "aggregate",
        )

    def dtypes(self, replies: Mapping[str, Reply]) -> dict[str, str]:
        return {name: dtype for name, (_, dtype) in self.federation.specs[next(iter(replies))].items()}

    def keep_assignments(self, client: str, assignments: "Mapping[int, np.ndarray[Any, Any]]") -> None:
        kept = {str(index): assignment.astype(np.int32) for index, assignment in assignments.items()}
        self.state.assignments[client] = kept

    def global_model(self) -> nn.Module | None:
        if not self.has_global_model:
            return None
        return resize(self.run.network_like(in_order(self.state.clients)[0]), self.state.model)


class PFNM(MatchedStrategy[PFNMOptions, MatchedState]):
    """PFNM: matches the hidden units of all layers in one round and averages matched units."""

    method = pfnm

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        payloads = super().configure_fit(round, clients)
        for client, payload in payloads.items():
            if assignments := self.state.assignments.get(client):
                payload.arrays["assignments"] = assignments
            elif payload.arrays and not self.fits(client):
                payload.arrays.clear()
        return payloads

    def check_reply(self, reply: Reply) -> None:
        super().check_reply(reply)
        self.check_classes(reply)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        specs = self.federation.specs
        states = {
            client: {name: array.astype(specs[client][name][1]) for name, array in reply.arrays["model"].items()}
            for client, reply in replies.items()
        }
        states = dict(self.aggregator.clipped(states))
        random = np.random.RandomState(derive_seed(self.config.seed, "matching", round) % 2**32)
        settled, moved = match_networks(list(states.values()), self.groups, self.matching(), random)
        matches = [each.match for each in settled]
        assignments = [{i: match.assignments[j] for i, match in enumerate(matches)} for j in range(len(replies))]
        rest = self.average_rest(moved, replies, assignments, [len(match.counts) for match in matches])
        self.state.assignments.clear()  # those of an earlier global model are no longer valid
        for client, assignment in zip(replies, assignments, strict=True):
            self.keep_assignments(client, assignment)
        matched = [(each.match.weights, each.carried) for each in settled]
        self.state.model = assemble(self.groups, self.dtypes(replies), matched, rest)
        local, units = np.mean([sum(self.widths(client)) for client in replies]), sum(len(m.counts) for m in matches)
        return {"units": float(units), "growth": float(units / local)}


@dataclass
class FedMAState(MatchedState):
    """The state of FedMA; in a pass, one layer (group of hidden units) is matched per round.

    Attributes:
        pass_: number of complete passes.
        step: index of the group that is matched next.
        holding: the clients that took part in the last round; only they can continue the pass.
        group: for each group matched in this pass, by index, the weights of the global units and BatchNorm's averages.
        last: the averaged output layer of the last complete pass.
    """

    pass_: int = 0
    step: int = 0
    holding: list[str] = field(default_factory=list)
    group: ArraysBy = field(default_factory=dict)
    last: Arrays = field(default_factory=dict)


class FedMA(MatchedStrategy[FedMAOptions, FedMAState]):
    """FedMA: matches and averages hidden units, one layer per round, in passes over all layers."""

    method = fedma

    def number_of_rounds(self) -> int:
        rounds, groups = self.config.rounds, len(self.groups)
        of_a_pass = groups + 1
        if rounds and rounds % of_a_pass:
            needs = (
                f"rounds = {rounds}: a pass of {self.method.name} over these networks takes {of_a_pass} rounds, "
                f"{groups} for hidden layers and one for the output layer: set rounds to a multiple of "
                f"{of_a_pass}, or to 0 for {self.method.family}.passes = {self.options.passes}"
            )
            if rounds < of_a_pass:
                raise FedhetError(needs)
            if not self.run.round.number:  # warn once
                log.warning("the last %d round(s) will not change the global model: %s", rounds % of_a_pass, needs)
        return rounds or self.options.passes * of_a_pass

    @property
    def has_global_model(self) -> bool:
        return self.state.pass_ > 0 and super().has_global_model

    @property
    def sizes(self) -> list[int]:
        return [len(self.state.group[str(index)]["rows"]) for index in range(self.state.step)]

    def participants(self, round: int) -> Sequence[str]:
        return self.state.holding if self.state.step else super().participants(self.state.pass_ + 1)

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        state, payloads = self.state, {}
        for client in clients:
            if state.step:
                index = str(state.step - 1)
                units = {"units": state.assignments[client][index]}
                payloads[client] = Payload({"group": state.group[index], "assignment": units})
            else:
                payloads[client] = self._complete_model(client)
                if "model" in payloads[client].arrays and not self.fits(client):
                    del payloads[client].arrays["model"]
            payloads[client].values["step"] = state.step
        return payloads

    def evaluation_payloads(self, clients: Sequence[str], *, amid_training: bool) -> dict[str, Payload]:
        if self.state.step and amid_training:
            return {client: Payload() for client in clients}
        return {client: self._complete_model(client) for client in clients}

    def _complete_model(self, client: str) -> Payload:
        keeps = client in self.state.holding and not self.state.step
        return Payload({"last": self.state.last}) if keeps else self.payload_for(client)

    def check_reply(self, reply: Reply) -> None:
        client, step, sizes = reply.client, self.state.step, self.sizes
        if reply.report.lost_state >= 0 and client in self.state.holding and "update" not in reply.arrays:
            return  # it takes part again in the next pass
        shapes = self.groups.shapes([*sizes, *self.widths(client)[step:]])
        names = due(self.groups, step, statistics=self.config.batch_norm == "aggregate")
        spec = self.federation.specs[client]
        expected = {name: (shapes[name], spec[name][1]) for name in names}
        check(reply.arrays.get("update", {}), expected, f"the client's update for group {step}")
        if step == len(self.groups):
            self.check_classes(reply)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        state = self.state
        there = {client: reply for client, reply in replies.items() if "update" in reply.arrays}
        state.holding = list(there)
        if not there:
            state.step = 0  # the pass begins again
            return {}
        updates = self.aggregator.clipped({client: reply.arrays["update"] for client, reply in there.items()})
        if state.step < len(self.groups):
            return self._match(updates)
        self._finish(updates, there)
        return {}

    def _match(self, states: Mapping[str, Arrays]) -> dict[str, float]:
        state, step = self.state, self.state.step
        units = [{index: state.assignments[client][str(index)] for index in range(step)} for client in states]
        random = np.random.RandomState(derive_seed(self.config.seed, "matching", state.pass_, step) % 2**32)
        matched = match_group(list(states.values()), self.groups, step, units, self.sizes, self.matching(), random)
        match = matched.match
        for client, known, assignment in zip(states, units, match.assignments, strict=True):
            self.keep_assignments(client, known | {step: assignment})
        parameters = {"rows": match.weights, **matched.carried}
        state.group[str(step)] = {name: array.astype(np.float32) for name, array in parameters.items()}
        state.step = step + 1
        local, size = np.mean([len(assignment) for assignment in match.assignments]), len(match.counts)
        return {"group": float(step), "units": float(size), "growth": float(size / local)}

    def _finish(self, states: Mapping[str, Arrays], replies: Mapping[str, Reply]) -> None:
        state = self.state
        rest = self.average_rest(list(states.values()), replies, [{} for _ in states], self.sizes)
        dtypes = self.dtypes(replies)
        state.last = {name: array.astype(dtypes[name]) for name, array in rest.items()}
        settled = []
        for index in range(len(self.groups)):
            carried = dict(state.group[str(index)])
            settled.append((carried.pop("rows").astype(np.float64), carried))
        state.model = assemble(self.groups, dtypes, settled, state.last)
        state.pass_, state.step = state.pass_ + 1, 0

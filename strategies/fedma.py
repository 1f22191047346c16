"""FedMA, server side: clients' units are matched layer by layer (Wang et al., ICLR 2020, algorithm 1).

A group is a set of hidden units that must be permuted together; in a plain network, the units of one layer. A pass
matches one group per round and averages the output layer in its last round, so it takes groups + 1 rounds. In round n
of a pass, clients send group n, with its inputs in the global order. The next message returns the matched group and
each client's assignment (the global unit of each local unit), and clients train the later layers. A further pass
("FedMA with communication") starts from local models that clients extract from the global model. A client that misses
a round leaves the pass, and can take part in the next one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedhet.algorithms.matching import assemble, due, match_group
from fedhet.errors import FedhetError
from fedhet.messages import Arrays, Payload, Reply, cast, check, narrowed
from fedhet.methods.included.matching import FedMAOptions, fedma
from fedhet.server import ArraysBy
from fedhet.utils.randomness import derive_seed
from fedhet.utils.text import log

from .pfnm import MatchedState, MatchedStrategy


@dataclass
class FedMAState(MatchedState):
    """The state of FedMA: the groups that the current pass has matched, and the clients' units in them.

    Attributes:
        pass_: number of complete passes.
        step: index of the group that is matched next.
        holding: the clients that sent the last group; they keep their networks, and go on with the pass.
        group: the weights of each group's global units and the parameters averaged with them, in the dtype sent.
        last: the output layer of the last complete pass.
    """

    pass_: int = 0
    step: int = 0
    holding: list[str] = field(default_factory=list)
    group: ArraysBy = field(default_factory=dict)
    last: Arrays = field(default_factory=dict)


class FedMA(MatchedStrategy[FedMAOptions, FedMAState]):
    """Matches and averages one layer per round; with `rounds = 0` (the default), a run has `fedma.passes` passes.

    `global_model()` builds the global model, which is wider than the clients' networks.
    """

    method = fedma
    state_class = FedMAState

    def number_of_rounds(self) -> int:
        """Return `rounds`, or if it is 0 the rounds of all passes; raise a FedhetError if one pass needs more."""
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
                log.warning("%s; the global model does not change in what is left over (%d)", needs, rounds % of_a_pass)
        return rounds or self.options.passes * of_a_pass

    @property
    def has_global_model(self) -> bool:
        return self.state.pass_ > 0 and super().has_global_model

    @property
    def sizes(self) -> list[int]:
        """Number of global units of each group that is matched in the current pass."""
        return [len(self.state.group[str(index)]["rows"]) for index in range(self.state.step)]

    # ---- a round

    def participants(self, round: int) -> Sequence[str]:
        return self.state.holding if self.state.step else super().participants(self.state.pass_ + 1)

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        """Return the group that was matched last with the client's assignment; at the start of a pass, the model.

        A client that does not keep its part of the model starts from its own weights if it has a wider layer.
        """
        step = self.state.step
        payloads = {client: self._news(client) if step else self._complete_model(client) for client in clients}
        for client, payload in payloads.items():
            if "model" in payload.arrays and not self.fits(client):
                del payload.arrays["model"]
            payload.values["step"] = step
        return payloads

    def evaluation_payloads(self, clients: Sequence[str], *, amid_training: bool) -> dict[str, Payload]:
        """Return the complete global model, or the part that a client lacks; nothing in the middle of a pass."""
        if self.state.step and amid_training:
            return {client: Payload() for client in clients}
        return {client: self._complete_model(client) for client in clients}

    def _news(self, client: str) -> Payload:
        index = str(self.state.step - 1)
        units = {"units": self.state.assignments[client][index]}
        return Payload({"group": self.state.group[index], "assignment": units})

    def _complete_model(self, client: str) -> Payload:
        """Return the output layer for a client that keeps all other layers, and the whole model for others."""
        keeps = client in self.state.holding and not self.state.step
        return Payload({"last": self.state.last}) if keeps else self.payload_for(client)

    def check_reply(self, reply: Reply) -> None:
        """Check a client's group; a client that lost its network sends none, and leaves the pass."""
        client, step, sizes = reply.client, self.state.step, self.sizes
        if reply.report.lost_state >= 0 and client in self.state.holding and "update" not in reply.arrays:
            return
        shapes = self.groups.shapes([*sizes, *self.widths(client)[step:]])
        names, spec = due(self.groups, step, statistics=self.statistics), self.federation.specs[client]
        expected = narrowed({name: (shapes[name], spec[name][1]) for name in names}, self.config.wire_dtype)
        check(reply.arrays.get("update", {}), expected, f"the client's update for group {step}")
        if step == len(self.groups):
            self.check_classes(reply)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Match the next group of units, or average the output layer and complete the pass."""
        state = self.state
        there = {client: reply for client, reply in replies.items() if "update" in reply.arrays}
        state.holding = list(there)
        if not there:
            state.step = 0  # the pass begins again
            return {}
        updates = self.aggregator.clipped({client: reply.arrays["update"] for client, reply in there.items()})
        states = {client: {n: _at_least_float32(a) for n, a in update.items()} for client, update in updates.items()}
        if state.step < len(self.groups):
            return self._match(states)
        self._finish(states, there)
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
        state.group[str(step)] = cast({n: a.astype(np.float32) for n, a in parameters.items()}, self.config.wire_dtype)
        state.step = step + 1
        local, size = np.mean([len(assignment) for assignment in match.assignments]), len(match.counts)
        return {"group": float(step), "units": float(size), "growth": float(size / local)}

    def _finish(self, states: Mapping[str, Arrays], replies: Mapping[str, Reply]) -> None:
        """Average the output layer, assemble the global model, and begin the next pass."""
        state = self.state
        rest = self.average_rest(list(states.values()), replies, [{} for _ in states], self.sizes)
        dtypes = self.dtypes(replies)
        state.last = cast({name: array.astype(dtypes[name]) for name, array in rest.items()}, self.config.wire_dtype)
        settled = []
        for index in range(len(self.groups)):
            carried = dict(state.group[str(index)])
            settled.append((carried.pop("rows").astype(np.float64), carried))
        state.model = assemble(self.groups, dtypes, settled, state.last)
        state.pass_, state.step = state.pass_ + 1, 0


def _at_least_float32(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.astype(np.float32) if array.dtype == np.float16 else array

"""FedMA, server side: clients' units are matched layer by layer (Wang et al., ICLR 2020, algorithm 1).

A group is a set of hidden units that must be permuted together; in a plain network, the units of one layer. A pass
matches one group per round and averages the output layer in its last round, so it takes groups + 1 rounds. In round n
of a pass, clients send group n, with its inputs in the global order. The next message returns the matched group and
each client's assignment (the global unit of each local unit), and clients train the later layers. A further pass
("FedMA with communication") starts from local models that clients extract from the global model. A client that missed
rounds sends all groups that it missed; its units are assigned to the global units, which do not change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedhet.algorithms.graphs import expand, rows
from fedhet.algorithms.matching import GroupMatch, LayerMatch, assemble, due, match_group
from fedhet.errors import FedhetError
from fedhet.messages import Arrays, Payload, Reply, WireError, cast, check, narrowed
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
        participants: the clients of the current pass.
        places: for each client, the pass of its last reply and the number of groups that it had then.
        group: the weights of each group's global units and the parameters averaged with them, in the dtype sent.
        match: counts, prior mean and variances of each group, by which late clients are assigned.
        last: the output layer of the last complete pass.
    """

    pass_: int = 0
    step: int = 0
    participants: list[str] = field(default_factory=list)
    places: dict[str, list[int]] = field(default_factory=dict)
    group: ArraysBy = field(default_factory=dict)
    match: ArraysBy = field(default_factory=dict)
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
        if not self.state.participants:
            self.state.participants = list(super().participants(self.state.pass_ + 1))
        return self.state.participants

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        """Return the groups matched since each client's last message, and the number of the next group.

        A client starts from its own weights if it has no assignments and a layer that is wider than the global one.
        """
        payloads = {client: self._news(client) for client in clients}
        for client, payload in payloads.items():
            if "model" in payload.arrays and "assignments" not in payload.arrays and not self.fits(client):
                del payload.arrays["model"]
            payload.values |= {"pass": self.state.pass_, "step": self.state.step}
        return payloads

    def evaluation_payloads(self, clients: Sequence[str], *, amid_training: bool) -> dict[str, Payload]:
        """Return the complete global model, or the part that a client lacks; nothing in the middle of a pass."""
        if self.state.step and amid_training:
            return {client: Payload() for client in clients}
        return {client: self._complete_model(client) for client in clients}

    def _news(self, client: str) -> Payload:
        """Return the groups matched since a client's last message; in its first message of a pass, the global model."""
        place = self.state.places.get(client)
        if place is None or place[0] != self.state.pass_:
            return self._complete_model(client)
        mine = self._assignments(client)
        new = range(place[1], len(mine))
        arrays = {f"group-{index}": self.state.group[str(index)] for index in new}
        if new:
            arrays["assignments"] = {str(index): mine[index] for index in new}
        return Payload(arrays, {"place": place})

    def _complete_model(self, client: str) -> Payload:
        state, last_place = self.state, [self.state.pass_ - 1, len(self.groups)]
        if state.places.get(client) == last_place:
            return Payload({"last": state.last}, {"place": last_place})
        payload = self.payload_for(client)
        assignments = state.assignments.get(client, {})
        if not payload.arrays:
            return payload
        if state.places.get(client, [None])[0] == last_place[0] and len(assignments) == len(self.groups):
            payload.arrays["assignments"] = assignments
        return payload

    def _assignments(self, client: str) -> dict[int, Any]:
        """Return the global unit of each of a client's units, by group, for the groups that it sent in this pass."""
        if self.state.places.get(client, [None])[0] != self.state.pass_:
            return {}
        stored = self.state.assignments.get(client, {})
        return {index: stored[str(index)] for index in range(len(stored))}

    def check_reply(self, reply: Reply) -> None:
        client, step, sizes = reply.client, self.state.step, self.sizes
        if reply.values.flag("lost", False):
            if "place" not in self._news(client).values:
                raise WireError("the client reports that it lost its state, but this round does not need a state")
            return
        done = len(self._assignments(client))
        widths = [*sizes[:done], *self.widths(client)[done:]]
        shapes, spec = self.groups.shapes(widths), self.federation.specs[client]
        names = due(self.groups, done, step, statistics=self.config.batch_norm == "aggregate")
        expected = narrowed({name: (shapes[name], spec[name][1]) for name in names}, self.config.wire_dtype)
        check(reply.arrays.get("update", {}), expected, f"the client's update for group {step}")
        if step == len(self.groups):
            self.check_classes(reply)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Match the next group of units, or average the output layer and complete the pass."""
        state, step = self.state, self.state.step
        there = {client: reply for client, reply in replies.items() if not reply.values.flag("lost", False)}
        for client in replies.keys() - there.keys():
            state.places.pop(client, None)
        states, late = {}, {}
        updates = self.aggregator.clipped({client: reply.arrays["update"] for client, reply in there.items()})
        for client, update in updates.items():
            try:
                held = len(self._assignments(client))
                states[client] = self._caught_up(client, update, held, step)
                state.places[client] = [state.pass_, held]
                late[client] = {i: assignment for i, assignment in self._assignments(client).items() if i >= held}
            except ValueError as error:
                self.run.round.fail(client, f"the client is left out until the next pass: {error}")
        if not states:
            return {}
        if step < len(self.groups):
            return self._match(step, states)
        self._finish(states, {client: there[client] for client in states}, list(late.values()))
        return {}

    def _caught_up(self, client: str, update: Arrays, held: int, step: int) -> Arrays:
        """Reorder a client's update to the global order of the matched groups, and keep the client's assignments.

        The client missed groups `held` to `step`; raises a ValueError if it has more units than one of these groups.
        """
        state = {
            name: array.astype(np.float32) if array.dtype == np.float16 else array for name, array in update.items()
        }
        units = self._assignments(client)
        for index in range(held, step):
            settled, matrix, random = self._settled(index), rows(state, self.groups, index), self._random(index, client)
            units[index] = self.matching().attach(matrix, self.groups[index], settled.match, settled.prior_mean, random)
            state = expand(state, self.groups, {index: units[index]}, {index: len(settled.match.counts)})
        self.keep_assignments(client, units)
        return state

    def _match(self, step: int, states: Mapping[str, Arrays]) -> dict[str, float]:
        units = {client: self._assignments(client) for client in states}
        how, random = self.matching(), self._random(step)
        matched = match_group(list(states.values()), self.groups, step, list(units.values()), self.sizes, how, random)
        for client, assignment in zip(states, matched.match.assignments, strict=True):
            self.keep_assignments(client, units[client] | {step: assignment})
        self._settle(step, matched, len(states))
        self.state.step = step + 1
        local = np.mean([len(assignment) for assignment in matched.match.assignments])
        size = len(matched.match.counts)
        return {"group": float(step), "units": float(size), "growth": float(size / local)}

    def _random(self, step: int, *late: str) -> np.random.RandomState:
        return np.random.RandomState(derive_seed(self.config.seed, "matching", self.state.pass_, step, *late) % 2**32)

    def _settle(self, index: int, matched: GroupMatch, clients: int) -> None:
        match = matched.match
        self.state.group[str(index)] = cast(
            {name: array.astype(np.float32) for name, array in {"rows": match.weights, **matched.carried}.items()},
            self.config.wire_dtype,
        )
        self.state.match[str(index)] = {
            "counts": match.counts,
            "prior-mean": matched.prior_mean,
            "variances": np.array([match.sigma2, match.sigma0_2]),
            "clients": np.array([clients]),
        }

    def _settled(self, index: int) -> GroupMatch:
        arrays, settled = self.state.match[str(index)], dict(self.state.group[str(index)])
        assignments = [np.empty(0, np.intp)] * int(arrays["clients"][0])
        weights = settled.pop("rows").astype(np.float64)
        match = LayerMatch(assignments, weights, arrays["counts"], *map(float, arrays["variances"]))
        return GroupMatch(match, arrays["prior-mean"], settled)

    def _finish(
        self, states: Mapping[str, Arrays], replies: Mapping[str, Reply], late: Sequence[Mapping[int, Any]]
    ) -> None:
        """Average the output layer, assemble the global model, and begin the next pass."""
        state = self.state
        rest = self.average_rest(list(states.values()), replies, late, self.sizes)
        dtypes = self.dtypes(replies)
        state.last = cast({name: array.astype(dtypes[name]) for name, array in rest.items()}, self.config.wire_dtype)
        settled = [(s.match.weights, s.carried) for s in map(self._settled, range(len(self.groups)))]
        state.model = assemble(self.groups, dtypes, settled, state.last)
        state.pass_, state.step, state.participants = state.pass_ + 1, 0, []

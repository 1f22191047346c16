"""FedMA (Wang et al., ICLR 2020, algorithm 1): the server matches hidden units of clients' networks, layer by layer.

In round n of a pass over the layers of a network (groups of hidden units that must be permuted together):

    client j:  sends layer n, W_jn, with its inputs in the order of the global units
    server:    {Pi_j} = BBP-MAP({W_jn}), the assignment of each client's units to global units
               W_n = mean of W_jn Pi_j^T, for each global unit over the clients that have it
    client j:  W_jn <- W_n, W_j,n+1 <- Pi_j W_j,n+1; then trains the layers after n

The output layer is averaged in the last round of a pass. A further pass starts from local models that clients extract
from the global model. A client that misses a round takes part again in the next pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedhet.algorithms.matching.groups import assemble, due, match_group
from fedhet.errors import FedhetError
from fedhet.messages import Arrays, Payload, Reply, check
from fedhet.server import ArraysBy, in_order, method, option
from fedhet.utils.randomness import derive_seed
from fedhet.utils.text import log

from .families.matched import MATCHED, PAPER, MatchedKeys, MatchedState, MatchedStrategy


@dataclass(frozen=True)
class Keys(MatchedKeys):
    passes: int = option(1, "number of passes over all layers, if rounds = 0", at_least=1)
    retrain_epochs: int = option(0, "number of epochs after a layer is matched; 0: local-epochs", at_least=0)
    last_epochs: int = option(3, "epochs of the output layer's round, as a multiple of retrain-epochs", at_least=0)
    last_learning_rate: float = option(0.0, "learning rate of the output layer's round; 0: learning-rate", at_least=0)

    without = ("closing-epochs",)  # Nothing is learnt from a round after the last pass.


@dataclass
class Pass(MatchedState):
    """The state of FedMA; in a pass, one layer (group of hidden units) is matched per round.

    Attributes:
        pass_: number of complete passes.
        step: index of the group that is matched next.
        group: for each group matched in this pass, by index, the weights of the global units and BatchNorm's averages.
        last: the averaged output layer of the last complete pass.
    """

    pass_: int = 0
    step: int = 0
    group: ArraysBy = field(default_factory=dict)
    last: Arrays = field(default_factory=dict)


@method(
    "fedma",
    MATCHED,
    Keys,
    client="fedhet.client_apps.fedma:FedMA",
    common={**PAPER, "rounds": 0},
    own={"rounds": 0, "local-epochs": 20, "fedma.retrain-epochs": 10},
)
class FedMA(MatchedStrategy[Keys, Pass]):
    """FedMA: matches and averages hidden units, one layer per round, in passes over all layers."""

    def number_of_rounds(self) -> int:
        rounds = self.config.rounds
        groups = len(self.groups)
        of_a_pass = groups + 1
        if rounds and rounds % of_a_pass:
            needs = (
                f"rounds = {rounds}: a pass of {self.method.name} over these networks takes {of_a_pass} rounds, "
                f"{groups} for hidden layers and one for the output layer: set rounds to a multiple of "
                f"{of_a_pass}, or to 0 for {self.method.family}.passes = {self.options.passes}"
            )
            if rounds < of_a_pass:
                raise FedhetError(needs)
            if not self.run.round.number:
                log.warning("the last %d round(s) will not change the global model: %s", rounds % of_a_pass, needs)
        return rounds or self.options.passes * of_a_pass

    @property
    def has_global_model(self) -> bool:
        return self.state.pass_ > 0 and super().has_global_model

    @property
    def sizes(self) -> list[int]:
        return [len(self.state.group[str(index)]["rows"]) for index in range(self.state.step)]

    def participants(self, round: int) -> Sequence[str]:
        in_pass = [client for client in in_order(self.state.clients) if self.federation.keeps(client)]
        if not in_pass:
            self.state.step = 0  # The pass begins again.
        return in_pass if self.state.step else super().participants(self.state.pass_ + 1)

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        state = self.state
        payloads = {}
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
        keeps = self.federation.keeps(client) and not self.state.step
        return Payload({"last": self.state.last}) if keeps else self.payload_for(client)

    def check_reply(self, reply: Reply) -> None:
        client = reply.client
        step = self.state.step
        shapes = self.groups.shapes([*self.sizes, *self.widths(client)[step:]])
        names = due(self.groups, step, statistics=self.config.batch_norm == "aggregate")
        spec = self.federation.specs[client]
        expected = {name: (shapes[name], spec[name][1]) for name in names}
        check(reply.arrays.get("update", {}), expected, f"the client's update for group {step}")
        if step == len(self.groups):
            self.check_classes(reply)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        state = self.state
        updates = self.aggregator.clipped({client: reply.arrays["update"] for client, reply in replies.items()})
        if state.step < len(self.groups):
            return self._match(updates)
        self._finish(updates, replies)
        return {}

    def _match(self, states: Mapping[str, Arrays]) -> dict[str, float]:
        state = self.state
        step = state.step
        units = [{index: state.assignments[client][str(index)] for index in range(step)} for client in states]
        random = np.random.RandomState(derive_seed(self.config.seed, "matching", state.pass_, step) % 2**32)
        matched = match_group(list(states.values()), self.groups, step, units, self.sizes, self.matching(), random)
        match = matched.match
        for client, earlier, assignment in zip(states, units, match.assignments, strict=True):
            self.keep_assignments(client, earlier | {step: assignment})
        parameters = {"rows": match.weights, **matched.carried}
        state.group[str(step)] = {name: array.astype(np.float32) for name, array in parameters.items()}
        state.step = step + 1
        local = np.mean([len(assignment) for assignment in match.assignments])
        size = len(match.counts)
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
        state.pass_ += 1
        state.step = 0

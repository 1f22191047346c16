"""PFNM (Yurochkin et al., ICML 2019): the server matches the hidden units of all layers in one round.

    client j:  W_j = argmin_W  L_j(W)
    server:    {Pi_j} = BBP-MAP({W_jn}), for each layer n, the assignment of each client's units to global units
               W_n = mean of W_jn Pi_j^T, for each global unit over the clients that have it

Clients have networks of one graph, of any widths.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from fedhet.algorithms.matching.groups import assemble, match_networks
from fedhet.server import Payload, Reply, method
from fedhet.utils.randomness import derive_seed

from .families.matched import MATCHED, PAPER, MatchedKeys, MatchedState, MatchedStrategy


@method(
    "pfnm",
    MATCHED,
    MatchedKeys,
    client="fedhet.client_apps.pfnm:PFNM",
    common={**PAPER, "rounds": 1},
    own={"rounds": 1, "local-epochs": 100, "batch-norm": "re-estimate"},
)
class PFNM(MatchedStrategy[MatchedKeys, MatchedState]):
    """PFNM: matches the hidden units of all layers in one round and averages matched units."""

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
        matches = [layer.match for layer in settled]
        assignments = [{i: match.assignments[j] for i, match in enumerate(matches)} for j in range(len(replies))]
        rest = self.average_rest(moved, replies, assignments, [len(match.counts) for match in matches])
        # Assignments to an earlier global model are no longer valid.
        self.state.assignments.clear()
        for client, assignment in zip(replies, assignments, strict=True):
            self.keep_assignments(client, assignment)
        matched = [(layer.match.weights, layer.carried) for layer in settled]
        self.state.model = assemble(self.groups, self.dtypes(replies), matched, rest)
        local = np.mean([sum(self.widths(client)) for client in replies])
        units = sum(len(match.counts) for match in matches)
        return {"units": float(units), "growth": float(units / local) if local else 1.0}

"""PFNM, server side: whole networks are matched at once (Yurochkin et al., ICML 2019; FedMA's one-shot baseline).

The paper's method is one round. In further rounds clients go on from the units that they have in the global model.

Client side: client_apps/pfnm.py; keys: fedhet/methods/pfnm.py.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from fedhet.matching import assemble, match_networks
from fedhet.methods import pfnm
from fedhet.randomness import derive_seed
from fedhet.wire import Payload, Reply

from ._matched import MatchedState, MatchedStrategy  # noqa: TID251 - this folder is fedhet.strategies


class PFNM(MatchedStrategy[pfnm.PFNMParameters, MatchedState]):
    """FedMA's matching of all layers in one round, without training in between."""

    method = pfnm.method

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        """Return the global model, and which of its units are the client's.

        There is nothing before the first, nor for a client without units in it that is wider: it begins with its own.
        """
        payloads = super().configure_fit(round, clients)
        for client, payload in payloads.items():
            if own := self.state.assignments.get(client):
                payload.arrays["assignments"] = own
            elif payload.arrays and not self.fits(client):
                payload.arrays.clear()
        return payloads

    def check_reply(self, reply: Reply) -> None:
        """The whole network, and class counts."""
        super().check_reply(reply)
        self.check_classes(reply)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Match all groups in order, then average the output layer."""
        states = {
            client: {
                name: array.astype(self.federation.specs[client][name][1])
                for name, array in reply.arrays["model"].items()
            }
            for client, reply in replies.items()
        }
        states = dict(self.aggregator.clipped(states))
        self.keep_filters(states)
        random = np.random.RandomState(derive_seed(self.config.seed, "matching", round) % 2**32)
        settled, moved = match_networks(list(states.values()), self.groups, self.matching(), random)
        matches = [each.match for each in settled]
        own = [{i: match.assignments[j] for i, match in enumerate(matches)} for j in range(len(replies))]
        rest = self.average_rest(moved, replies, own, [len(match.counts) for match in matches])
        self.state.assignments.clear()  # those of an earlier global model mean nothing any more
        for client, mine in zip(replies, own, strict=True):
            self.keep_assignments(client, mine)
        self.state.model = assemble(
            self.groups, self.dtypes(replies), [(each.match.weights, each.carried) for each in settled], rest
        )
        local = np.mean([sum(self.widths(client)) for client in replies])
        units = sum(len(match.counts) for match in matches)
        return {"units": float(units), "growth": float(units / local)}

"""FedKD (Wu et al., 2022): each client's own network and a small shared one learn from each other.

    client i:  L_own    = CE(own, y)    + [KL(shared || own) + MSE(H_own, W H_shared)] / s
               L_shared = CE(shared, y) + [KL(own || shared) + MSE(H_own, W H_shared)] / s
               s = CE(own, y) + CE(shared, y)
    server:    averages the changes of the shared networks, which are sent as low-rank factors

H are the networks' representations, W is a learned linear projector that stays on the client; s and the first argument
of each KL are constants. Clients that trained in the last round receive the last change, others the whole network.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedhet.messages.payload import add_factors, from_factors, to_factors
from fedhet.server import Arrays, FederatedStrategy, Payload, Reply, State, WireError, method

from .families.small_network import SMALL_NETWORK, SmallNetworkKeys


class Keys(SmallNetworkKeys):
    planned = True


FIRST, LAST = 0.95, 0.98
"""The fractions that `energy` returns at the start and in the last round."""


def energy(round: int, rounds: int) -> float:
    """Return the fraction of the sum of an update's squared singular values that FedKD keeps in `round` of `rounds`."""
    return FIRST + min(round / max(rounds, 1), 1.0) * (LAST - FIRST)


@dataclass
class LastChange(State):
    """The state of FedKD: the shared network's last change, `update`."""

    update: Arrays = field(default_factory=dict)


@method(
    "fedkd",
    replace(
        SMALL_NETWORK, other_arrays="entries", sends={"model": "weights", "update": "weights"}, inside="representation"
    ),
    Keys,
    client="fedhet.client_apps.fedkd:FedKD",
)
class FedKD(FederatedStrategy[Keys, LastChange]):
    """FedKD: the average of the changes of a small shared network; the clients' own networks are not sent."""

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        change = Payload({"model": self.state.update}, {"change": True})
        return {client: change if self.federation.keeps(client) else self.payload_for(client) for client in clients}

    def evaluation_payloads(self, clients: Sequence[str], *, amid_training: bool) -> dict[str, Payload]:
        return {client: Payload() for client in clients}

    def check_reply(self, reply: Reply) -> None:
        """Convert the low-rank `update` in a reply to weights."""
        if "update" not in reply.arrays:
            raise WireError("the client's reply lacks 'update', the shared network's change: check the client's mods")
        spec = self.federation.specs[reply.client]
        reply.arrays["update"] = from_factors(reply.arrays["update"], self.state.model, spec, "the client's update")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        state = self.state
        models = {client: reply.arrays["update"] for client, reply in replies.items()}
        mean = self.aggregator.average(models, self.aggregator.weights(replies))
        state.update = to_factors(mean, state.model, energy(round, self.config.rounds))
        state.model = add_factors(state.update, state.model, self.federation.specs[next(iter(models))])
        return {}

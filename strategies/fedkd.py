"""FedKD, server side: averages the changes of a small network, sent as low-rank factors (Wu et al., 2022).

Clients that trained in the last round receive the last change; others receive the whole network.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedhet.messages import Arrays, Payload, Reply, WireError
from fedhet.messages.factors import apply, pack, unpack
from fedhet.methods.included.distillation import AuxiliaryOptions, energy, fedkd
from fedhet.server import FederatedStrategy, State


@dataclass
class FedKDState(State):
    """The state of FedKD: the packed last change of the shared network, and the clients that can apply this change."""

    update: Arrays = field(default_factory=dict)
    holding: list[str] = field(default_factory=list)


class FedKD(FederatedStrategy[AuxiliaryOptions, FedKDState]):
    """Averages the changes of the small shared network; the clients' own networks are not sent."""

    method = fedkd
    state_class = FedKDState

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        """Return the last change of the shared network, or the whole network for clients that cannot apply it."""
        change = Payload({"model": self.state.update}, {"change": True})
        return {client: change if client in self.state.holding else self.payload_for(client) for client in clients}

    def evaluation_payloads(self, clients: Sequence[str], *, amid_training: bool) -> dict[str, Payload]:
        return {client: Payload() for client in clients}

    def check_reply(self, reply: Reply) -> None:
        """Replace the factors of a client's update by the updated shared network.

        A client that lost the network does not train and sends no update.
        """
        if "update" in reply.arrays:
            spec, dtype = self.federation.specs[reply.client], self.config.wire_dtype
            reply.arrays["update"] = unpack(
                reply.arrays["update"], self.state.model, spec, dtype, "the client's update"
            )
        elif reply.client not in self.state.holding or reply.report.lost_state < 0:
            raise WireError("the client's reply has no update of the shared network")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        state, dtype = self.state, self.config.wire_dtype
        models = {client: reply.arrays["update"] for client, reply in replies.items() if "update" in reply.arrays}
        state.holding = list(models)
        if models:
            mean = self.aggregator.average(models, {client: float(replies[client].examples) for client in models})
            spec = self.federation.specs[state.holding[0]]
            state.update = pack(mean, state.model, energy(round, self.config.rounds), dtype)
            state.model = apply(state.update, state.model, spec)
        return {}

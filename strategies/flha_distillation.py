"""FLHA-distillation, server side: a teacher is trained by FedAvg, and then sent to each client to learn from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedhet.messages import Payload, Reply
from fedhet.methods.included.distillation import FLHADistillationOptions, flha_distillation
from fedhet.server import FederatedStrategy, State, in_order


@dataclass
class FLHADistillationState(State):
    """The state of FLHA-distillation: `taught` are the clients that have received the final teacher."""

    taught: list[str] = field(default_factory=list)


class FLHADistillation(FederatedStrategy[FLHADistillationOptions, FLHADistillationState]):
    """Averages the teacher in the first rounds; afterwards clients train their own networks without averaging."""

    method = flha_distillation
    state_class = FLHADistillationState

    @property
    def teaching(self) -> bool:
        """Whether the current round trains the teacher."""
        return self.state.round < self.options.teaching(self.config.rounds)

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        """Return the teacher; once its training is over, only for clients that do not have the final teacher."""
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

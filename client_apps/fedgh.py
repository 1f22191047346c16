"""Client side of FedGH: replaces the client's head by the server's head, then trains with the task's loss."""

from fedhet.messages import Payload, load_into
from fedhet.strategies.families.at_server import LearnerKeys

from .families.by_class import ByClass, SameWidth


class FedGH(SameWidth[LearnerKeys], ByClass[LearnerKeys]):
    def handshake(self, payload: Payload) -> Payload:
        self.check_linear_head("the server trains one head for all")
        return super().handshake(payload)

    def begin(self, payload: Payload) -> None:
        load_into(self.client.model.get_submodule(self.client.head).state_dict(), payload.arrays["head"])

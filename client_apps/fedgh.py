"""FedGH, client side: load the server's head, train, and send mean representations of classes (Yi et al., 2023)."""

from fedhet.messages import Payload, load_into
from fedhet.methods.included.prototypes import FedGHOptions

from ._prototypes import OneWidth  # noqa: TID251 - this folder is fedhet.client_apps


class FedGH(OneWidth[FedGHOptions]):
    """Replaces the client's head by the server's head, then trains with the task's loss."""

    def handshake(self, payload: Payload) -> Payload:
        """Return the representation's width; raises a ModelError or DataError if the server's head would not fit."""
        self.check_linear_head("the server trains one for all")
        return super().handshake(payload)

    def begin(self, payload: Payload) -> None:
        """Load the server's head into the client's network."""
        load_into(self.client.model.get_submodule(self.client.head).state_dict(), payload.arrays["head"])

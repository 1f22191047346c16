"""FedGH, client side: trains from the server's head on, and sends mean representations of classes (Yi et al., 2023)."""

from torch import nn

from fedhet.errors import ModelError
from fedhet.methods.fedgh import FedGHParameters
from fedhet.wire import Payload, load_into

from .fedproto import OneWidth  # noqa: TID251 - this folder is fedhet.client_apps


class FedGH(OneWidth[FedGHParameters]):
    """Puts the server's head in the place of its own, and trains by the task's loss."""

    def handshake(self, payload: Payload) -> Payload:
        """Return the width; raises a ModelError or DataError for a head that the server's cannot stand in for."""
        client = self.client
        client.check_classes(outputs=True)
        head = client.model.get_submodule(client.head)
        if not isinstance(head, nn.Linear) or head.bias is None or head.out_features != client.outputs:
            raise ModelError(
                f"fedgh needs an nn.Linear with a bias and {client.outputs} outputs as head, not a {head}: the server "
                "trains one for all"
            )
        return super().handshake(payload)

    def begin(self, payload: Payload) -> None:
        """Load the head."""
        load_into(self.client.model.get_submodule(self.client.head).state_dict(), payload.arrays["head"])

"""pFedHN, client side: train the received weights and send their change (Shamsian et al., ICML 2021, algorithm 1)."""

from fedhet.client import ClientSide
from fedhet.messages import Payload, to_arrays
from fedhet.methods.included.hypernetworks import PFedHNOptions


class PFedHN(ClientSide[PFedHNOptions]):
    """Trains the received weights and sends their change."""

    def begin(self, payload: Payload) -> None:
        """Load the received weights and keep a copy, to compute their change after training."""
        super().begin(payload)
        self.start = {key: tensor.clone() for key, tensor in self.shared().items()}

    def end(self, payload: Payload) -> Payload:
        """Return the change of the weights: the weights after training minus the received weights."""
        delta = {key: tensor - self.start[key] for key, tensor in self.shared().items()}
        return Payload({"delta": to_arrays(delta, self.client.config.wire_dtype)})

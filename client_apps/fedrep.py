"""FedRep, client half: the head is the client's own, the body is shared (Collins et al., ICML 2021, algorithm 1)."""

from collections.abc import Sequence
from dataclasses import replace

from fedhet.client import ClientHalf
from fedhet.exchange import Exchange
from fedhet.training import Phase
from fedhet.wire import Payload


class FedRep(ClientHalf):
    """Trains the head on the received body, then the body under that head."""

    personal = True

    def exchange(self) -> Exchange:
        """The body."""
        return replace(super().exchange(), part="body")

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Head first, then body; both within the round's epochs, so that no method takes more steps than another."""
        epochs, head = self.client.request.epochs, f"{self.client.head}."
        body = min(self.parameters.body_epochs, epochs)
        optimisation = self.client.optimisation()
        return [
            Phase(epochs - body, optimisation, trains=lambda name: name.startswith(head)),
            Phase(body, optimisation, trains=lambda name: not name.startswith(head)),
        ]

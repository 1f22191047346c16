"""FedRep, client side: the head is personal, the body is shared (Collins et al., ICML 2021, algorithm 1)."""

from collections.abc import Sequence

from fedhet.client import ClientSide
from fedhet.messages import Payload
from fedhet.methods.included.averaging import FedRepOptions
from fedhet.training import Phase


class FedRep(ClientSide[FedRepOptions]):
    """Trains the head on the received body, then the body with the head frozen; in the closing round only the head."""

    takes_any_loop = True

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return a phase for the head and one for the body, within the round's epochs."""
        request, head = self.client.request, f"{self.client.head}."
        body = 0 if request.closing else min(self.options.body_epochs, request.epochs)
        optimisation = self.client.optimisation()
        return [
            Phase(request.epochs - body, optimisation, trains=lambda name: name.startswith(head)),
            Phase(body, optimisation, trains=lambda name: not name.startswith(head)),
        ]

    def end(self, payload: Payload) -> Payload:
        """Return the body, or nothing if this round did not train the body."""
        return Payload() if self.client.request.closing else super().end(payload)

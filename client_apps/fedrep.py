"""Client side of FedRep: trains the head, then the other layers; after the last round, only the head."""

from fedhet.client import ClientSide, Payload, Phase
from fedhet.strategies.fedrep import Keys


class FedRep(ClientSide[Keys]):
    takes_any_loop = True

    def phases(self, payload: Payload) -> list[Phase]:
        request = self.client.request
        head = f"{self.client.head}."
        body_epochs = 0 if request.closing else min(self.options.body_epochs, request.epochs)
        optimisation = self.client.optimisation()
        return [
            Phase(request.epochs - body_epochs, optimisation, trains=lambda name: name.startswith(head)),
            Phase(body_epochs, optimisation, trains=lambda name: not name.startswith(head)),
        ]

    def end(self, payload: Payload) -> Payload:
        return Payload() if self.client.request.closing else super().end(payload)

"""Client side of FedMD: trains once on public labels; in each round on mean class scores, then private examples."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedhet.client import Payload, Phase, Step
from fedhet.data import Examples
from fedhet.strategies.fedmd import Keys

from .families.scores import Scores


class FedMD(Scores[Keys]):
    takes_estimators = True
    remembers = True  # It remembers whether it has been trained.

    @staticmethod
    def distance(step: Step, outputs: Tensor) -> Tensor:
        return step.mean((outputs - step.labels).abs())

    def handshake(self, payload: Payload) -> Payload:
        self.client.check_scores("of which it exchanges means", numbers=True)
        return Payload()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        settings = self.options
        client = self.client
        begins = "begun" not in client.memory
        client.memory["begun"] = torch.ones(1, dtype=torch.uint8)
        phases = []
        if begins and settings.public_epochs:
            assert client.public.labels is not None  # as the traits say
            public = Examples(client.public.inputs, client.public.labels)
            phases.append(Phase(settings.public_epochs, client.optimisation(), examples=public, public=True))
        phases += self.digest(payload, settings.digest_epochs)
        phases.append(Phase((begins and settings.first_epochs) or client.request.epochs, client.optimisation()))
        return self.in_turn(phases)

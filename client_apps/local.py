"""Local training, client side: a model of its own, on its own data."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedhet.client import ClientSide
from fedhet.data import Examples
from fedhet.learning import Phase
from fedhet.methods.local import LocalParameters
from fedhet.wire import Payload


class Local(ClientSide[LocalParameters]):
    """One phase; nothing travels."""

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """On its own examples, or on those and the pool's."""
        phases = super().phases(payload)
        if self.parameters.pool == "unused":
            return phases
        own, pool = self.client.data.train, self.client.pool
        assert pool.labels is not None  # as the traits say
        both = Examples(torch.cat([own.inputs[:], pool.inputs]), torch.cat([own.labels, pool.labels]))
        return [replace(phase, examples=both) for phase in phases]

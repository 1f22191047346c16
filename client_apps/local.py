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
        """On its own examples, or on those and the public dataset's."""
        phases = super().phases(payload)
        if self.parameters.public == "unused":
            return phases
        own, public = self.client.data.train, self.client.public
        assert public.labels is not None  # as the traits say
        both = Examples(torch.cat([own.inputs[:], public.inputs]), torch.cat([own.labels, public.labels]))
        return [replace(phase, examples=both) for phase in phases]

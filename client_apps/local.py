"""Local training, client side: each client trains its own model on its own data."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedhet.client import ClientSide
from fedhet.data import Examples
from fedhet.messages import Payload
from fedhet.methods.included.averaging import LocalOptions
from fedhet.training import Phase


class Local(ClientSide[LocalOptions]):
    """Trains the client's own model and sends nothing."""

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return one phase on the client's examples, to which public examples are added if configured."""
        phases = super().phases(payload)
        if self.options.public == "unused":
            return phases
        train, public = self.client.data.train, self.client.public
        assert public.labels is not None  # as the traits say
        inputs, labels = train.at(slice(None))
        both = Examples(torch.cat([inputs, public.inputs]), torch.cat([labels, public.labels]))
        return [replace(phase, examples=both, augmented=True) for phase in phases]

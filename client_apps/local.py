"""Client side of local training, which sends nothing."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedhet.client import ClientSide, Payload, Phase
from fedhet.data import Examples
from fedhet.strategies.local import Keys


class Local(ClientSide[Keys]):
    takes_estimators = True

    def phases(self, payload: Payload) -> Sequence[Phase]:
        phases = super().phases(payload)
        if self.options.public == "unused":
            return phases
        public = self.client.public
        assert public.labels is not None  # as the traits say
        if self.client.estimator:  # is fitted to all phases together
            return [*phases, replace(phases[0], examples=Examples(public.inputs, public.labels))]
        inputs, labels = self.client.data.train.at(slice(None))
        examples = Examples(torch.cat([inputs, public.inputs]), torch.cat([labels, public.labels]))
        return [replace(phase, examples=examples, augmented=True) for phase in phases]

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
        train = self.client.data.train
        groups = train.groups
        if groups == ():  # of a node that trains on no example of its own
            return [replace(phase, examples=Examples(public.inputs, public.labels), augmented=True) for phase in phases]
        inputs, labels = train.at(slice(None))
        if groups is not None:  # those of private examples stay whole
            rows = torch.arange(len(train), len(train) + len(public), device=labels.device)
            groups = (*groups, *rows.tensor_split(max(len(rows) // self.client.least, 1)))
        examples = Examples(torch.cat([inputs, public.inputs]), torch.cat([labels, public.labels]), groups)
        return [replace(phase, examples=examples, augmented=True) for phase in phases]

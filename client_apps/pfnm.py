"""PFNM, client side: train a network and send it (Yurochkin et al., ICML 2019)."""

from collections.abc import Sequence

import numpy as np

from fedhet.graphs import cut_out
from fedhet.learning import Phase
from fedhet.methods.pfnm import PFNMParameters
from fedhet.wire import Payload, to_arrays

from ._matched import Matched  # noqa: TID251 - this folder is fedhet.client_apps


class PFNM(Matched[PFNMParameters]):
    """One phase, from weights of one's own or from one's own units of the global model."""

    def begin(self, payload: Payload) -> None:
        """Take on the global model in its own widths."""
        if "model" in payload.arrays:
            self._use(payload.arrays["model"])
            self.client.reestimate()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Training of one's own units; the first ones of the global model, if it has none of the client's."""
        if "model" in payload.arrays:
            own = payload.arrays.get("assignments", {})
            assignments = {g.index: own.get(str(g.index), np.arange(g.width)) for g in self.groups}
            self._use(cut_out(to_arrays(self.client.tensors), self.groups, assignments))
        return super().phases(payload)

    def end(self, payload: Payload) -> Payload:
        """The network, and how many examples of each class there are."""
        reply = super().end(payload)
        reply.arrays |= self.class_counts()
        return reply

"""Client side of PFNM: trains its own network or, later, the units of the global model that match its units."""

from collections.abc import Sequence

import numpy as np

from fedhet.algorithms.graphs import cut_out, widths
from fedhet.messages import Payload, check_places, to_arrays
from fedhet.strategies.families.matched import MatchedKeys
from fedhet.training import Phase

from .families.matched import Matched


class PFNM(Matched[MatchedKeys]):
    def phases(self, payload: Payload) -> Sequence[Phase]:
        if "model" in payload.arrays:
            units = payload.arrays.get("assignments", {})
            state = to_arrays(self.client.tensors)
            assignments = {g.index: units.get(str(g.index), np.arange(g.width)) for g in self.groups}
            for index, width in enumerate(widths(state, self.groups)):
                check_places(assignments[index], width, "units")
            self.use(cut_out(state, self.groups, assignments))
        return super().phases(payload)

    def end(self, payload: Payload) -> Payload:
        reply = super().end(payload)
        reply.arrays |= self.class_counts()
        return reply

"""Layer-average, client side: train the network, send its layers."""

from itertools import islice

from fedhet.client import ClientSide
from fedhet.methods.layer_average import LayerAverageParameters
from fedhet.wire import Payload


class LayerAverage(ClientSide[LayerAverageParameters]):
    """One phase trains the whole network; by prefix only those first layers go up that all networks have."""

    def end(self, payload: Payload) -> Payload:
        """The layers; of common first layers as many arrays as the server says."""
        reply = super().end(payload)
        if "common" not in payload.values:
            return reply
        common = dict(islice(reply.arrays.get("model", {}).items(), payload.values["common"]))
        return Payload({"common": common} if common else {})

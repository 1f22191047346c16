"""Layer-average, client side: train the network and send its layers, which the server averages by layer."""

from itertools import islice

from fedhet.client import ClientSide
from fedhet.messages import Payload
from fedhet.methods.included.averaging import LayerAverageOptions


class LayerAverage(ClientSide[LayerAverageOptions]):
    """Trains the whole network; with `by = prefix`, only the first layers that all networks have in common are sent."""

    takes_any_loop = True

    def end(self, payload: Payload) -> Payload:
        """Return the layers; with `by = prefix`, as many of the first arrays as the server requests."""
        reply = super().end(payload)
        if "common" not in payload.values:
            return reply
        common = dict(islice(reply.arrays.get("model", {}).items(), payload.values["common"]))
        return Payload({"common": common} if common else {})

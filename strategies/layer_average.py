"""Layer-average, server side: each layer is averaged over the clients that have it."""

from collections.abc import Mapping

from fedhet.messages import Payload, Reply, check, narrowed
from fedhet.methods.included import layer_average
from fedhet.server import FederatedStrategy, State


class LayerAverage(FederatedStrategy[layer_average.LayerAverageOptions, State]):
    """Averages like FedAvg, but each layer over the clients that have it."""

    method = layer_average.method

    def payload_for(self, client: str) -> Payload:
        """Return the client's shared layers; with `by = prefix`, only the layers that all clients have."""
        payload = super().payload_for(client)
        if self.options.by != "prefix":
            return payload
        common = self._common
        model = {key: array for key, array in payload.arrays.get("model", {}).items() if key in common}
        return Payload({"model": model} if model else {}, {"common": len(common)})

    def check_reply(self, reply: Reply) -> None:
        """Check that the reply has the shared layers; with `by = prefix`, exactly the layers that all clients have."""
        if self.options.by != "prefix":
            return super().check_reply(reply)
        spec = {key: of for key, of in self.federation.specs[reply.client].items() if key in self._common}
        check(reply.arrays.get("common", {}), narrowed(spec, self.config.wire_dtype), "the client's common layers")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average each layer over the clients that have it; with `by = prefix`, only layers that all clients have."""
        for reply in replies.values():
            if "common" in reply.arrays:
                reply.arrays["model"] = reply.arrays.pop("common")
        return super().aggregate_fit(round, replies)

    @property
    def _common(self) -> frozenset[str]:
        """The names of the shared arrays that all clients have."""
        return frozenset.intersection(*map(frozenset, self.federation.specs.values()))

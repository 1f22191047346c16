"""FLHA-GHN, server side: averages a graph hypernetwork, which generates weights (Litany et al., 2022, algorithm 1)."""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from fedhet.algorithms.hypernets import start
from fedhet.messages import Arrays, Payload, Reply, Spec, WireError, to_arrays
from fedhet.methods.included.hypernetworks import FLHAGHNOptions, flha_ghn
from fedhet.server import FederatedStrategy, RunningMean, State


class FLHAGHN(FederatedStrategy[FLHAGHNOptions, State]):
    """Averages clients' hypernetworks with equal weights, one reply at a time, since a hypernetwork may be large."""

    method = flha_ghn
    streams_replies = True
    copies = 4  # the state, the sum, and a message

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.streams_replies = self.aggregator.plain  # other rules need all replies at once

    def compatibility(self, reply: Reply) -> Hashable:
        """Return the default values and the shapes of the hypernetwork, which must be the same for all clients."""
        return super().compatibility(reply), tuple(reply.report.spec.items())

    def first_arrays(self, missing: Spec) -> Arrays:
        """Draw the hypernetwork's weights from the seed; raise a WireError if a name or shape does not belong to it."""
        if self.state.model:
            raise WireError(
                f"the client's array {next(iter(missing))[:100]} is not in the hypernetwork that the other clients have"
            )
        try:
            drawn = partial(start, seed=self.config.seed, normalise=self.options.normalise)
            return to_arrays({key: drawn(key, shape) for key, (shape, _) in missing.items()})
        except ValueError as error:
            raise WireError(str(error)) from error

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        """Return the hypernetwork for each client, and start the sum of replies."""
        self._mean = RunningMean()
        return super().configure_fit(round, clients)

    def consume_reply(self, round: int, reply: Reply) -> None:
        """Add a client's hypernetwork to the running mean."""
        self._mean.add(reply.arrays.pop("model"), 1.0, self.federation.specs[reply.client])

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average the clients' hypernetworks with equal weights, or by the configured aggregation rule."""
        if self.streams_replies:
            mean = self._mean.mean()
        else:
            models = {client: reply.arrays["model"] for client, reply in replies.items()}
            specs = {client: self.federation.specs[client] for client in models}
            mean = self.aggregator.average(models, dict.fromkeys(models, 1.0), specs)
        self.state.model = self.state.model | mean
        return {}

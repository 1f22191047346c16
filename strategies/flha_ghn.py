"""FLHA-GHN, server side: averages the hypernetwork (Litany et al., 2022, algorithm 1)."""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from fedhet.algorithms.hypernets import start
from fedhet.messages import Arrays, Payload, Reply, Spec, WireError, to_arrays
from fedhet.methods.included import flha_ghn
from fedhet.server import FederatedStrategy, RunningMean, State


class FLHAGHN(FederatedStrategy[flha_ghn.FLHAGHNParameters, State]):
    """The uniform mean over the clients of a round, added up one reply at a time, since a hypernetwork may be large."""

    method = flha_ghn.method
    streams_replies = True
    copies = 4  # the state, the sum, and a message

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.streams_replies = self.aggregator.plain  # other rules need all replies at once

    def compatibility(self, reply: Reply) -> Hashable:
        """Return the default and the arrays' shapes, since all clients hold the same arrays."""
        return super().compatibility(reply), tuple(reply.report.spec.items())

    def first_arrays(self, missing: Spec) -> Arrays:
        """Draw parameters from the seed by name and shape; raises WireError if a hypernetwork has no such parameter."""
        if self.state.model:
            raise WireError(
                f"{next(iter(missing))[:100]} is none of the arrays of the hypernetwork that all clients hold"
            )
        try:
            drawn = partial(start, seed=self.config.seed, normalise=self.parameters.normalise)
            return to_arrays({key: drawn(key, shape) for key, (shape, _) in missing.items()})
        except ValueError as error:
            raise WireError(str(error)) from error

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        """Return the hypernetwork."""
        self._mean = RunningMean()
        return super().configure_fit(round, clients)

    def consume_reply(self, round: int, reply: Reply) -> None:
        """Add a client's hypernetwork to the mean."""
        self._mean.add(reply.arrays.pop("model"), 1.0, self.federation.specs[reply.client])

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average the hypernetworks uniformly, or by another rule."""
        if self.streams_replies:
            mean = self._mean.mean()
        else:
            models = {client: reply.arrays["model"] for client, reply in replies.items()}
            specs = {client: self.federation.specs[client] for client in models}
            mean = self.aggregator.average(models, dict.fromkeys(models, 1.0), specs)
        self.state.model = self.state.model | mean
        return {}

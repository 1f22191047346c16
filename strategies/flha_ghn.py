"""FLHA-GHN, server side: averages the hypernetwork (Litany et al., 2022, algorithm 1)."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from fedhet.hypernets import start
from fedhet.methods import flha_ghn
from fedhet.server import FederatedStrategy, RunningMean, State
from fedhet.wire import Arrays, Payload, Reply, Spec, WireError, to_arrays


class FLHAGHN(FederatedStrategy[flha_ghn.FLHAGHNParameters, State]):
    """The uniform mean over the clients of a round, added up one reply at a time, since a hypernetwork may be large."""

    method = flha_ghn.method
    takes_in = True
    copies = 4  # the state, the sum, and a message

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.takes_in = self.aggregator.plain  # other rules need all replies at once

    def compatibility(self, reply: Reply) -> Hashable:
        """Return the default and, where all clients have the same heads, the arrays' shapes."""
        return super().compatibility(reply), tuple(reply.report.spec.items()) if self._alike else ()

    @property
    def _alike(self) -> bool:
        """Whether all clients hold the same arrays."""
        return self.parameters.share == "all" or self.parameters.head == "tiled"

    def first_arrays(self, missing: Spec) -> Arrays:
        """Draw parameters from the seed by name and shape; raises WireError if a hypernetwork has no such parameter."""
        if self._alike and self.state.model:
            raise WireError(
                f"{next(iter(missing))[:100]} is none of the arrays of the hypernetwork that all clients hold"
            )
        try:
            drawn = partial(start, seed=self.config.seed, normalise=self.parameters.normalise)
            return to_arrays({key: drawn(key, shape) for key, (shape, _) in missing.items()})
        except ValueError as error:
            raise WireError(str(error)) from error

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        """Return the hypernetwork, or each client's part of it."""
        self._mean, self._owners, self._replies = RunningMean(), Counter[str](), 0
        return super().configure_fit(round, clients)

    def take_in(self, round: int, reply: Reply) -> None:
        """Add a client's hypernetwork to the mean."""
        sent = reply.arrays.pop("model")
        self._replies += 1
        self._owners.update(sent.keys())
        self._mean.add(sent, 1.0, self.federation.specs[reply.client])

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average the hypernetworks uniformly, or by another rule."""
        self.state.model = self.state.model | (self._mean_of_all() if self.takes_in else self._by_rule(replies))
        return {}

    def _mean_of_all(self) -> Arrays:
        """Return the uniform mean; a client without an array counts as one that did not change it."""
        for key, owners in self._owners.items():
            if (others := self._replies - owners) > 0:
                now = self.state.model[key]
                self._mean.add({key: now}, float(others), {key: (now.shape, str(now.dtype))})
        return self._mean.mean()

    def _by_rule(self, replies: Mapping[str, Reply]) -> Arrays:
        """Return the average by a rule that needs all hypernetworks at once."""
        models = {client: reply.arrays["model"] for client, reply in replies.items()}
        specs = {client: self.federation.specs[client] for client in models}
        keys = {key: each for spec in specs.values() for key, each in spec.items()}
        models = {client: {key: self.state.model[key] for key in keys} | model for client, model in models.items()}
        specs = dict.fromkeys(models, keys)
        return self.aggregator.average(models, dict.fromkeys(models, 1.0), specs)

"""FLHA-GHN, server side: averages a graph hypernetwork, which generates weights (Litany et al., 2022, algorithm 1)."""

from collections.abc import Mapping
from functools import partial
from hashlib import sha256

import torch

from fedhet.algorithms.hypernets import start
from fedhet.messages import Arrays, Reply, Spec, WireError, to_arrays, to_tensor
from fedhet.methods.included.hypernetworks import FLHAGHNOptions, flha_ghn
from fedhet.server import Common, FederatedStrategy, State


class FLHAGHN(FederatedStrategy[FLHAGHNOptions, State]):
    """Averages clients' hypernetworks with equal weights, or by the configured aggregation rule."""

    method = flha_ghn
    copies = 4  # the state, the sum, and a message

    def common(self, reply: Reply) -> Mapping[str, Common]:
        digest = sha256(repr(sorted(reply.report.spec.items())).encode()).hexdigest()[:12]
        return {"digest of the hypernetwork's arrays": Common(digest, "all clients need the same version of fedhet")}

    def first_arrays(self, missing: Spec) -> Arrays:
        """Draw the hypernetwork's weights from the seed; raise a WireError if a name or shape does not belong to it."""
        try:
            drawn = partial(start, seed=self.config.seed, normalise=self.options.normalise)
            return to_arrays({key: drawn(key, shape) for key, (shape, _) in missing.items()})
        except ValueError as error:
            raise WireError(str(error)) from error

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        models = {client: reply.arrays["model"] for client, reply in replies.items()}
        if not self.aggregator.plain:
            self.state.model = self.state.model | self.aggregator.average(models, dict.fromkeys(models, 1.0))
            return {}
        models = dict(self.aggregator.clipped(models, dict.fromkeys(models, self.state.model)))
        for name in dict.fromkeys(name for model in models.values() for name in model):
            arrays = [to_tensor(model[name]).float() for model in models.values() if name in model]
            self.state.model = self.state.model | to_arrays({name: sum(arrays, torch.zeros(())) / len(arrays)})
        return {}

"""Strategy of FedHeNN: clients align their representations (Makhija et al., ICML 2022).

If clients are heterogeneous (algorithm 2), the server averages the kernels of their representations of the alignment
examples X(t) (in the paper: RAD), and each client aligns its kernel to the mean. If they are homogeneous (algorithm 1),
weights are averaged as in FedAvg, and each client aligns to the global model's representations, which it computes.

In round t of algorithm 2, a client receives the mean kernel on X(t) and returns its representations of X(t+1). With the
key `target = spectral`, an extension, it returns class probabilities, and aligns to a spectral clustering of examples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedhet.algorithms.alignment.targets import check_posteriors, cluster_rows, mean_target, pack, unpack
from fedhet.data import PublicDataset
from fedhet.errors import ConfigError, FedhetError
from fedhet.messages import Arrays, Payload, Reply, WireError, to_tensor
from fedhet.methods.included.fedhenn import LEAST_ROWS, FedHeNNOptions, fedhenn
from fedhet.server import FederatedStrategy, State
from fedhet.setup import client_setup
from fedhet.utils.randomness import torch_generator

from .families.scores import distance_metric, packed_rows, public_rows


@dataclass
class FedHeNNState(State):
    """The state of FedHeNN: clients align to `target` (made by `pack`) on public examples of round `target_round`."""

    target: Arrays = field(default_factory=dict)
    target_round: int = 0


class FedHeNN(FederatedStrategy[FedHeNNOptions, FedHeNNState]):
    """FedHeNN: clients align their representations to a common target; homogeneous clients also average weights."""

    method = fedhenn

    def __init__(self, *args: Any, public: PublicDataset | Tensor | None = None, **settings: Any) -> None:
        super().__init__(*args, public=public, **settings)
        supplied = public is not None and public is not client_setup.public_dataset(self.config)
        if self.options.rad_source == "train-union" and supplied:
            raise ConfigError(
                "fedhenn.rad-source = 'train-union' takes the public examples from the training examples of all "
                "clients, but a public dataset was passed, too: leave it out, or set fedhenn.rad-source = held-out"
            )

    def public_dataset(self) -> PublicDataset | None:
        if self.options.rad_source == "train-union" and self.options.eta0:
            return client_setup.training_union(self.config)
        return super().public_dataset()

    def admit(self, reply: Reply) -> None:
        if self.options.eta0 and self.state.public_size < LEAST_ROWS:
            raise FedhetError(
                f"the public dataset has {self.state.public_size} examples, but at least {LEAST_ROWS} are "
                "needed: set public-samples higher, or fedhenn.eta0 = 0 for no alignment"
            )

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        """Return payloads by client: indices of public examples; from round 2, target and weight of the alignment."""
        payloads, common = super().configure_fit(round, clients), Payload()
        if not self.options.eta0:
            return payloads
        # After a round that did not count, the last target is for other rows than this round's.
        target = self.state.target if self.state.target_round == round else {}
        if round > 1 and (target or not self.sent_name):
            common.values["eta"] = self.options.eta(round)
            common.arrays["rad"] = {"rows": self.rad(round)}
            if target:
                common.arrays["target"] = target
        if self._asks_for_next_rad(round):
            common.arrays["next-rad"] = {"rows": self.rad(round + 1)}
        return {c: Payload(p.arrays | common.arrays, p.values | common.values) for c, p in payloads.items()}

    def check_reply(self, reply: Reply) -> None:
        super().check_reply(reply)
        reply.values.number("distance", default=0.0)
        if self.sent_name in reply.arrays or self._asks_for_next_rad(self.state.round + 1):
            name, rows = self.sent_name, len(self.rad(1))
            values = packed_rows(reply, name, check_posteriors if name == "posteriors" else None)
            if len(values) != rows:
                raise WireError(
                    f"the client's {name} have {len(values)} rows, not {rows}: give it the server's public dataset"
                )

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        if self.options.homogeneous:
            super().aggregate_fit(round, replies)
        name = self.sent_name
        sent = {client: reply.arrays[name] for client, reply in replies.items() if name in reply.arrays}
        if sent:
            values = {client: unpack(arrays) for client, arrays in sent.items()}
            self.state.target, self.state.target_round = self.next_target(values, round + 1), round + 1
        return distance_metric(replies.values(), "alignment")

    def rad(self, round: int) -> NDArray[np.int32]:
        """Return the indices of a round's alignment examples in the public dataset, drawn at random from the seed."""
        return public_rows(self.config.seed, "rad", round, self.state.public_size, self.options.rad_size)

    @property
    def sent_name(self) -> str:
        """Name of what clients send for alignment examples: `features`, `posteriors`, or empty if nothing."""
        return next((name for name in ("features", "posteriors") if name in self.traits.sends), "")

    def _asks_for_next_rad(self, round: int) -> bool:
        return bool(self.sent_name) and round != self.run.last_round

    def next_target(self, sent: Mapping[str, Tensor], round: int) -> Arrays:
        """Return the target F (L, r) of the L alignment examples of `round`, as arrays: F = `values` * 2^`exponent`.

        `sent` has each client's representations A (L, d); F F^T approximates the mean of the kernels A A^T. For
        spectral targets, `sent` has class probabilities (L, C), and F has left singular vectors of their concatenation.
        """
        if self.traits.other_arrays:  # representations, whose norm is bounded; posteriors have a given one
            bounded = self.aggregator.clipped({client: {"features": values.numpy()} for client, values in sent.items()})
            sent = {client: to_tensor(arrays["features"]) for client, arrays in bounded.items()}
        peers = list(sent.values())
        if self.options.target == "spectral":
            generator = torch_generator(self.config.seed, "parallel analysis", round)
            return pack(cluster_rows(peers, generator=generator))
        return pack(mean_target(peers))

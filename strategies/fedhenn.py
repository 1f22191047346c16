"""FedHeNN, server half: clients align what their networks represent (Makhija et al., ICML 2022).

Heterogeneous clients (algorithm 2): the server makes the mean kernel K-bar(t-1) = sum_j w_j K_j of the peers'
representations of the RAD X(t), and each client is pulled towards it. Homogeneous clients (algorithm 1): weights are
averaged as in FedAvg, and each client is pulled towards the representation of the global model, which it computes.

One exchange a round: a client of round t receives the target on X(t), and returns its representation of X(t+1). With
the spectral target, which is fedhet's own, it returns its class posteriors instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet import population
from fedhet.data import Pool
from fedhet.errors import ConfigError, FedhetError
from fedhet.learning import read
from fedhet.methods import fedhenn
from fedhet.randomness import numpy_generator, torch_generator
from fedhet.representations import Representation, linear_cka
from fedhet.representations.features import ROWS_AT_ONCE
from fedhet.representations.packing import Factor, check_told_features, pack, pack_blocks, unpack
from fedhet.representations.spectral import check_posteriors, cluster_rows, posteriors
from fedhet.representations.targets import mean_rbf_blocks, mean_target
from fedhet.server import ArraysBy, FederatedStrategy, State
from fedhet.wire import Arrays, Payload, Reply, WireError, load_into, to_tensor

NO_POOL = (
    "fedhenn.representations = 'server' needs the pool at the server, and only clients have it: give "
    "make_server_app(shared=...) or FedHeNN(shared=...)"
)


@dataclass
class FedHeNNState(State):
    """What peers told.

    Attributes:
        target: what clients are aligned with, as it travels, and
        target_round: the round on whose RAD it is.
        peer: each client's newest model, where the server represents.
        peers: the clients of the last round, there.
        before: each client's representation of some rows of the pool before training, and
        after: after it, for the report.
    """

    target: Arrays = field(default_factory=dict)
    target_round: int = 0
    peer: ArraysBy = field(default_factory=dict)
    peers: list[str] = field(default_factory=list)
    before: ArraysBy = field(default_factory=dict)
    after: ArraysBy = field(default_factory=dict)


class FedHeNN(FederatedStrategy[fedhenn.FedHeNNParameters, FedHeNNState]):
    """Equations 5 and 6: F(W_i) + eta(t) d_CKA(K_i, K-bar(t-1))."""

    method = fedhenn.method
    state_class = FedHeNNState

    def __init__(self, *args: Any, shared: Pool | Tensor | None = None, **settings: Any) -> None:
        super().__init__(*args, shared=shared, **settings)
        own = self.parameters
        if own.rad_source == "train-union" and shared is not None and shared is not population.shared_pool(self.config):
            raise ConfigError(
                "fedhenn.rad-source = 'train-union' draws the RAD from the configured data set, and a pool was given "
                "as well: leave one of them out"
            )
        self._told = "posteriors" if own.target == "spectral" else "features"

    # ---- greeting: the pool, once

    def public_dataset(self) -> Pool | None:
        """The pool that all RADs are drawn from."""
        if self.parameters.rad_source == "train-union" and self.parameters.eta0:
            return population.training_union(self.config)
        return super().public_dataset()

    def admit(self, reply: Reply) -> None:
        """The pool must do; a client's representation of some of it is kept for the report."""
        own = self.parameters
        if not own.eta0:
            return
        self._check_listed(reply)
        if self._represents:
            if self.public_dataset() is None:
                raise FedhetError(NO_POOL)
            self.check_network(reply)
        if self.state.pool_size < fedhenn.LEAST_ROWS:
            raise FedhetError(
                f"the pool has {self.state.pool_size} examples: at least {fedhenn.LEAST_ROWS} are needed to align"
            )
        if self._has_probe(reply):
            self.state.before[reply.client] = reply.arrays["probe"]

    # ---- a round

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        """The target on X(t) and eta(t); the rows of X(t+1), on which the next target will be.

        There is no term in the first round, whose clients have learnt nothing yet.
        """
        payloads = super().configure_fit(round, clients)
        if not self.parameters.eta0:
            return payloads
        self._weights(clients)
        own, eta = self.parameters, self.parameters.eta(round) if round > 1 else 0.0
        target = None if own.alone or not eta else self._target(round)
        common = Payload()
        if eta and (own.alone or target):
            common.values["eta"] = eta
            common.arrays["rad"] = {"rows": self.rad(round)}
            if target:
                common.arrays["target"] = target
        if self._told_in_replies(round):
            common.arrays["next-rad"] = {"rows": self.rad(round + 1)}
        return {c: Payload(p.arrays | common.arrays, p.values | common.values) for c, p in payloads.items()}

    def check_reply(self, reply: Reply) -> None:
        """Representations must be there, and of the rows that were asked for."""
        super().check_reply(reply)
        reply.told.number("distance", 0.0)
        if self._told not in reply.arrays:
            if self._told_in_replies(self.state.round + 1):
                raise WireError(f"its {self._told} are missing")
            return
        self._unpacked(self._told, reply, len(self.rad(1)))

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average weights (homogeneous); make the next target, or keep the models to make it of."""
        if self.parameters.homogeneous:
            super().aggregate_fit(round, replies)
        if self._represents:
            sent = {c: reply.arrays["model"] for c, reply in replies.items() if "model" in reply.arrays}
            self.state.peers = list(replies)
            self.state.peer |= sent
        elif target := self._of_peers(self._tellings(replies), round + 1):
            self.state.target, self.state.target_round = target, round + 1
        distances = [r.payload.values["distance"] for r in replies.values() if "distance" in r.payload.values]
        return {"alignment": 1 - float(np.mean(distances))} if distances else {}

    def rad(self, round: int) -> np.ndarray[Any, Any]:
        """The pool's rows that are X(t), (L,) int32, drawn from the seed."""
        order = numpy_generator(self.config.seed, "rad", round).permutation(self.state.pool_size)
        return order[: self.parameters.rad_size].astype(np.int32)

    @property
    def _represents(self) -> bool:
        """Whether the server represents, with the models that clients send."""
        return self.parameters.representations == "server"

    def _told_in_replies(self, round: int) -> bool:
        """Whether clients tell with their training reply what the next target is made of; in the last round none is."""
        own, last = self.parameters, self.config.rounds + bool(self.config.closing_epochs)
        return bool(own.eta0) and not own.alone and not self._represents and own.peers == "selected" and round != last

    def _target(self, round: int) -> Arrays | None:
        """What clients are aligned with on X(t), as it travels; None as long as there is nobody to take it of."""
        if self._represents:
            peers = self.in_order(self.state.peer)
            if self.parameters.peers == "selected":
                peers = [client for client in peers if client in self.state.peers]
            return self._of_peers({client: self._represent(client, round) for client in peers}, round)
        if self.parameters.peers == "all":
            asked = Payload({"next-rad": {"rows": self.rad(round)}})
            return self._of_peers(self._tellings(self.ask(self._told, dict.fromkeys(self.present, asked))), round)
        # After a round that did not count, the last target is of other rows than this round's.
        return self.state.target if self.state.target_round == round else None

    def _represent(self, client: str, round: int) -> Tensor:
        """A stored client model's representation of X(t), or its posteriors."""
        model, pool = self.network_of(client), self.public_dataset()
        if pool is None:  # in a run that is resumed without it; else see `admit`
            raise FedhetError(NO_POOL)
        load_into(model.state_dict(), self.state.peer[client])
        rad = pool.inputs[torch.from_numpy(self.rad(round)).long()]
        if self.parameters.augments(self.config) and (augment := population.dataset_of(self.config).augment):
            rad = augment(rad, torch_generator(self.config.seed, fedhenn.AUGMENTATION, round))
        if self._told == "posteriors":
            return posteriors(model, rad, self.transform)
        until = Representation(model, self.config.head)
        return read(model, rad, self.transform, until=until, rows=ROWS_AT_ONCE)

    def _tellings(self, replies: Mapping[str, Reply]) -> dict[str, Tensor]:
        """The representations or posteriors of the clients that sent them."""
        told = {client: reply.arrays[self._told] for client, reply in replies.items() if self._told in reply.arrays}
        return {client: unpack(arrays).values for client, arrays in told.items()}

    def _of_peers(self, told: Mapping[str, Tensor], round: int) -> Arrays | None:
        """The target on X(t) of what peers told of it, as it travels.

        The paper's is K-bar = sum_j w_j K_j: a factor of it, or for the RBF kernel the diagonal blocks that batches
        use. None where there is nobody, or nobody with a weight.
        """
        own, weights = self.parameters, self._weights(list(told))
        if not any(weights):
            return None
        if self.traits.combined:
            bounded = self.bounded({client: {"features": values.numpy()} for client, values in told.items()})
            told = {client: to_tensor(arrays["features"]) for client, arrays in bounded.items()}
        peers = list(told.values())
        if own.whose == "shuffled":
            order = torch.randperm(len(peers[0]), generator=torch_generator(self.config.seed, fedhenn.SHUFFLE, round))
            peers = [peer[order] for peer in peers]
        if own.target == "spectral":
            generator = torch_generator(self.config.seed, "parallel analysis", round)
            rows = cluster_rows(peers, weights, clusters=own.clusters, generator=generator)
            return pack(Factor(rows), own.target_dtype)
        if own.kernel == "rbf":
            blocks = mean_rbf_blocks(
                peers, weights, own.rad_batch, threshold=own.rbf_threshold, normalise=own.kernel_norm
            )
            return pack_blocks(blocks, own.target_dtype)
        return pack(mean_target(peers, weights, normalise=own.kernel_norm, error=own.target_error), own.target_dtype)

    def _weights(self, clients: Sequence[str]) -> list[float]:
        if self.parameters.peer_weights == "uniform":
            return [1 / max(len(clients), 1)] * len(clients)
        if self.parameters.peer_weights == "examples":
            examples = [self.state.clients[client].examples for client in clients]
            return [count / sum(examples) for count in examples]
        listed, places = fedhenn.listed_weights(self.parameters.peer_weights), self._places()
        return [listed[places[client]] for client in clients]

    def _check_listed(self, reply: Reply) -> None:
        """Where weights are listed there must be one for this client, and for all those that it says there are.

        Raises:
            ConfigError: there are fewer.
        """
        if self.parameters.peer_weights in ("uniform", "examples"):
            return
        listed, place = fedhenn.listed_weights(self.parameters.peer_weights), reply.report.partition
        count = max(len(self.state.clients) + 1, place[1] if place and reply.client == str(place[0]) else 0)
        if count > len(listed):
            raise ConfigError(f"fedhenn.peer-weights has {len(listed)} numbers for {count} clients")

    def _places(self) -> dict[str, int]:
        """Each client's place in order of name, also of those that are still to come where partitions tell."""
        known = self.state.clients
        partitions = {client: record.partition[0] for client, record in known.items() if record.partition}
        if all(client == str(partitions.get(client)) for client in known):
            return partitions
        return {client: index for index, client in enumerate(self.in_order(known))}

    def _has_probe(self, reply: Reply) -> bool:
        """Whether a client tells what its network makes of some of the pool, which must be of that many examples."""
        if reply.arrays.get("probe"):
            self._unpacked("probe", reply, min(self.parameters.probe, self.state.pool_size))
            return True
        return False

    def _unpacked(self, what: str, reply: Reply, rows: int) -> None:
        try:
            values = unpack(reply.arrays[what], "float16" if what == "probe" else self.parameters.target_dtype).values
            check_told_features(values, what)
            if what == "posteriors":
                check_posteriors(values)
        except ValueError as error:
            raise WireError(f"its {what} cannot be read: {error}") from error
        if len(values) != rows:
            raise WireError(f"its {what} have {len(values)} rows, the RAD {rows}")

    # ---- report

    def take_last(self, reply: Reply) -> None:
        """Keep the representation after training beside that before."""
        if self._has_probe(reply):
            self.state.after[reply.client] = reply.arrays["probe"]

    def matrices(self) -> dict[str, Any]:
        """Pairwise CKA between clients on rows of the pool, before and after training."""
        before, after = self.state.before, self.state.after
        clients = [client for client in self.in_order(after) if client in before]
        if not clients:
            return {}
        names = [self.state.clients[client].architecture for client in clients]
        pairwise = {
            "before": _pairwise([before[client] for client in clients]),
            "after": _pairwise([after[client] for client in clients]),
        }
        return {"cka": {"clients": clients, "architectures": names, **pairwise}}


def _pairwise(probes: Sequence[Arrays]) -> list[list[float]]:
    features = [unpack(probe).values for probe in probes]
    return [[float(linear_cka(one, other)) for other in features] for one in features]

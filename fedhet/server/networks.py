"""Client networks that are built at the server, for methods that need them there."""

from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from fedhet.config import client_setup
from fedhet.config.client_setup import ClientInfo
from fedhet.errors import FedhetError, ModelError
from fedhet.messages import Reply, difference, spec_of
from fedhet.server.run import Run
from fedhet.utils.randomness import seeded


class Networks:
    """Builds networks of the clients' architectures at the server."""

    def __init__(self, run: Run, strategy: str) -> None:
        self.run = run
        self._way_out = f"give it the clients' models, make_server_app(model=...) or {strategy}(model=...)"

    def like(self, client: str) -> nn.Module:
        """Return a network of a client's architecture with arbitrary weights; raise a FedhetError if it is unknown."""
        known = self.run.state.clients[client]
        return self._build(client, known.architecture, known.partition)

    def check(self, reply: Reply) -> None:
        """Raise a FedhetError unless the server can build the network that a client described in its handshake."""
        report = reply.report
        build = partial(self._build, report.client, report.architecture, report.partition)
        if not self.run.model:
            client_setup.dataset_of(self.run.config)  # it is cached, and cannot be read on the meta device
        try:
            # On the meta device: a false claim of a large network costs no memory.
            with nullcontext() if self.run.model else torch.device("meta"):
                built = build()
        except (NotImplementedError, RuntimeError):  # it computes while it is built
            built = build()
        if (spec := spec_of(built.state_dict())) != report.spec:
            raise FedhetError(
                f"the client's network differs from the one that the server builds ({difference(report.spec, spec)}): "
                f"{self._way_out}"
            )

    def _build(self, client: str, architecture: str, place: tuple[int, int] | None) -> nn.Module:
        model = self.run.model
        partition, partitions = place or (None, None)
        node = {"architecture": architecture} if architecture and not model else {}
        if partition is None and not node and not model:
            raise FedhetError(
                f"client {client} discloses neither its architecture (disclose-architecture) nor its partition-id, and "
                "the server needs to build its network"
            )
        info = ClientInfo(client, partition, partitions, self.run.config, node)
        owner = client_setup.owner_of_weights(self.run.config, client)
        with seeded(self.run.config.seed, "initial weights", owner):
            if model:
                return model(info)
            try:
                return client_setup.model_of(info)
            except ModelError as error:
                raise FedhetError(
                    f"the server cannot build a network like client {client}'s ({error}): {self._way_out}"
                ) from error

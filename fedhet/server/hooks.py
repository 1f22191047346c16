"""All hooks of a method at the server, with their defaults, which average the shared arrays."""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch import nn

from fedhet.data import PublicDataset
from fedhet.method import Method, Traits
from fedhet.options import Config, Parameters
from fedhet.randomness import numpy_generator
from fedhet.rows import in_order
from fedhet.server.aggregation import Aggregator
from fedhet.server.federation import Federation
from fedhet.server.networks import Networks
from fedhet.server.roster import Common
from fedhet.server.run import Run
from fedhet.state import State
from fedhet.wire import Arrays, Payload, Reply, Spec, WireError, load_into, without_widths

P = TypeVar("P", bound=Parameters)
S = TypeVar("S", bound=State)


class Hooks(Generic[P, S]):
    """Seventeen hooks; a method overrides those that it needs.

    Attributes:
        method: the method as a value, set by the subclass.
        state_class: the class of the method's state, a subclass of `State`.
        copies: how often the server holds arrays that it makes for a client by the shapes that the client reported, 0
            if it makes none.
        takes_in: whether replies are large and taken in one by one (`take_in`), so that they are never all in memory.
        run: values of the run, such as the current round.
        federation: the clients: which are present, what they share, and questions to them.
        aggregator: averages by the sharing map, with the configured rule.
        networks: builds networks like the clients' at the server.
    """

    role: ClassVar[str] = "server"
    method: Method
    state_class: ClassVar[type[State]] = State
    copies: ClassVar[int] = 0
    takes_in: bool = False
    run: Run
    federation: Federation
    aggregator: Aggregator
    networks: Networks

    @property
    def config(self) -> Config:
        """The run's complete configuration."""
        return self.run.config

    @property
    def parameters(self) -> P:
        """The method's own keys."""
        return cast(P, self.run.config.parameters)

    @property
    def traits(self) -> Traits:
        """The method's traits, for these parameters."""
        return self.run.traits

    @property
    def state(self) -> S:
        """The state, which is kept between rounds."""
        return cast(S, self.run.state)

    @state.setter
    def state(self, state: S) -> None:
        self.run.state = state

    # ---- the handshake

    def public_dataset(self) -> PublicDataset | None:
        """Return the public dataset to send in the handshake; None if clients have it, or need none."""
        return self.run.public

    def common(self, reply: Reply) -> Mapping[str, Common]:
        """Return by name, as in "its NAME is 3", the method's values that all clients must have in common.

        The majority of the first clients decides (`compatibility`), and a client with another value is refused.
        """
        return {}

    def compatibility(self, reply: Reply) -> Hashable:
        """Return the part of a client's report that all clients must have in common.

        Among new clients, those with the most frequent value are admitted first. By default the value is the task, the
        arrays of networks that must be equal, the public dataset if clients have it, and the method's `common` values.
        """
        report, networks = reply.report, self.traits.alike
        kinds = {"equal": report.spec, "widths": without_widths(report.spec)}.get(networks, {})
        brought = self.traits.public != "none" and self.public_dataset() is None
        public = (report.public, report.public_size) if brought else ()
        return (
            report.metric,
            report.labels,
            tuple(kinds.items()),
            report.groups,
            public,
            tuple(self.common(reply).items()),
        )

    def admit(self, reply: Reply) -> None:
        """Admit a client by its reply to the first handshake (finite arrays), or raise an exception to refuse it."""

    def first_arrays(self, missing: Spec) -> Arrays | None:
        """Return first values of shared keys that have none yet, if the server draws them.

        By default None: clients send their initial weights.
        """
        return None

    def number_of_rounds(self) -> int:
        """Return the number of rounds; called once the clients are present, also in a resumed run."""
        return self.config.rounds

    # ---- a round

    def participants(self, round: int) -> Sequence[str]:
        """Return the clients that take part in a round; by default drawn from the seed among all clients ever admitted.

        Absent clients are not replaced.
        """
        known = in_order(self.state.clients)
        count = max(1, math.floor(self.config.fraction_train * len(known) + 0.5))
        drawn = numpy_generator(self.config.seed, "participation", round).permutation(len(known))[:count]
        return [known[index] for index in sorted(drawn)]

    def payload_for(self, client: str) -> Payload:
        """Return the payload of a client for training or evaluation; by default its part of the shared arrays."""
        model = self.aggregator.part_of(client)
        return Payload({"model": model} if model else {})

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        """Return the payloads of the chosen clients in this round; by default those of `payload_for`.

        Not the method of this name in Flower's older API: it returns payloads by client name.

        Args:
            round: from 1.
            clients: the chosen clients, in order of name.
        """
        return {client: self.payload_for(client) for client in clients}

    def evaluation_payloads(self, clients: Sequence[str], *, amid_training: bool) -> dict[str, Payload]:
        """Return the payloads of clients that are only evaluated; by default those of `payload_for`.

        `amid_training` says whether other clients train in the same round.
        """
        return {client: self.payload_for(client) for client in clients}

    def check_reply(self, reply: Reply) -> None:
        """Check a reply after training, and raise a WireError if it is wrong; by default a shared model must be in it.

        Arrays are already known to be finite, and those of the model to have the right names and shapes.
        """
        if self.federation.specs[reply.client] and "model" not in reply.arrays:
            raise WireError("its model is missing")

    def take_in(self, round: int, reply: Reply) -> None:
        """Remove large arrays from a valid reply before `aggregate_fit` receives it.

        Called if `takes_in` is set, in order of client name. If the round does not count in the end, `configure_fit` is
        called again.
        """

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Update `state` from the valid replies of a round, and return metrics for the history.

        By default, average the shared arrays, weighted by numbers of examples. Not the method of this name in Flower's
        older API: `replies` maps client names to replies, in order of name.
        """
        models = {client: reply.arrays["model"] for client, reply in replies.items() if "model" in reply.arrays}
        if models and self.traits.shares.averaged:
            weights = {client: float(replies[client].examples) for client in models}
            self.state.model = self.state.model | self.aggregator.average(models, weights)
        return {}

    # ---- the end

    def take_last(self, reply: Reply) -> None:
        """Check and keep a reply to the evaluation at the end of the run; raises a WireError if it is wrong."""

    @property
    def has_global_model(self) -> bool:
        """Whether there is a `global_model` yet; by default if clients share one network, or the server has one."""
        return (self.traits.whole or self.state.serves) and bool(self.state.model)

    def global_model(self) -> nn.Module | None:
        """Return the global model; None if there is none, or if BatchNorm's statistics stay with clients."""
        if not self.has_global_model:
            return None
        model = self.networks.like(in_order(self.state.clients)[0])
        if model.state_dict().keys() - self.state.model.keys():
            return None
        load_into(model.state_dict(), self.state.model)
        return model

    def matrices(self) -> dict[str, Any]:
        """Return matrices by name, as JSON values, for the method's `drawings` in the report."""
        return {}

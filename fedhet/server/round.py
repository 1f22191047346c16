"""The hooks of a method at the server, with their defaults, and the round that calls them."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch import nn

from fedhet.data import PublicDataset
from fedhet.errors import FedhetError
from fedhet.flower import Message, MessageType, MetricRecord
from fedhet.messages import Arrays, Payload, Reply, Spec, WireError, as_declared, load_into, without_widths
from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Config, Parameters
from fedhet.results.state import State
from fedhet.server.aggregation import Aggregator
from fedhet.server.federation import Federation
from fedhet.server.handshake import Handshake
from fedhet.server.networks import Networks
from fedhet.server.reporter import Reporter
from fedhet.server.roster import Common
from fedhet.server.run import Round, Run
from fedhet.utils.ordering import in_order
from fedhet.utils.randomness import numpy_generator
from fedhet.utils.text import log

P = TypeVar("P", bound=Parameters)
S = TypeVar("S", bound=State)


class Hooks(Generic[P, S]):
    """The hooks, of which a method overrides those that it needs.

    Attributes:
        method: the method's declaration, set by the subclass.
        state_class: the class of the method's state, a subclass of `State`.
        copies: how many copies of a client's network the server makes from the reported shapes; 0 if it makes none.
        streams_replies: whether large replies are consumed one by one (`consume_reply`), never all in memory.
        run: values of the run, such as the current round.
        federation: the clients, and the exchange of messages with them.
        aggregator: averages by the sharing map, with the configured rule.
        networks: builds networks like the clients' at the server.
        reporter: reports rounds to observers.
    """

    role: ClassVar[str] = "server"
    method: Method
    state_class: ClassVar[type[State]] = State
    copies: ClassVar[int] = 0
    streams_replies: bool = False
    run: Run
    federation: Federation
    aggregator: Aggregator
    networks: Networks
    reporter: Reporter
    _handshake: Handshake

    def run_round(self, round: int) -> MetricRecord:
        """Run one round and return its metrics; the round after the last one of training is the closing round.

        A round is one exchange of messages. A message to a client that trains also asks for its evaluation.
        """
        run, federation = self.run, self.federation
        run.round = Round(round, closing=round > run.training_rounds)
        self._handshake.admit()  # clients that come late
        self._prepare()
        payloads = self._choose()
        evaluate = run.round.closing or run.evaluates(round)
        epochs = self.config.closing_epochs if run.round.closing else self.config.local_epochs
        messages = federation.messages(MessageType.TRAIN, payloads, epochs=epochs, evaluate=evaluate)
        if evaluate:
            others = [client for client in federation.present if client not in payloads]
            messages += self._evaluation(others, amid_training=not run.round.closing)
        replies = federation.exchange(messages, self._check)
        return self.reporter.record(replies, self._aggregate(replies))

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
        """Return the method's values that all clients must have in common, by name for messages ("its NAME is 3").

        The majority of the first clients decides; a client with another value is refused.
        """
        return {}

    def compatibility(self, reply: Reply) -> Hashable:
        """Return the part of a client's report that all clients must have in common.

        Clients with the most frequent value are admitted first. By default it has the task, the arrays of networks that
        must be equal, the public dataset if clients bring it, and the method's `common` values.
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
        """Keep what a client sent in its first handshake, or raise an exception to refuse the client."""

    def first_arrays(self, missing: Spec) -> Arrays | None:
        """Return first values of shared keys that have none yet, if the method draws them.

        By default None: clients send their initial weights.
        """
        return None

    def first_model(self, reply: Reply) -> Arrays:
        """Return the initial weights that a client was asked for; raise a WireError if they are wrong."""
        return reply.arrays.get("model", {})

    def number_of_rounds(self) -> int:
        """Return the number of rounds; called when the clients are present, also in a resumed run."""
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
        """Return the payloads of the chosen clients in a round (from 1), by client; by default those of `payload_for`.

        Flower's older API has another method of this name.
        """
        return {client: self.payload_for(client) for client in clients}

    def evaluation_payloads(self, clients: Sequence[str], *, amid_training: bool) -> dict[str, Payload]:
        """Return the payloads of clients that are only evaluated; by default those of `payload_for`.

        `amid_training` says whether other clients train in the same round.
        """
        return {client: self.payload_for(client) for client in clients}

    def check_reply(self, reply: Reply) -> None:
        """Check a reply after training, and raise a WireError to refuse it; by default it must have a shared model.

        Arrays are finite, and the model's have the right names and shapes: that was checked before. Whatever
        `aggregate_fit` could not use must be refused here, since an exception there ends the run.
        """
        if self.federation.specs[reply.client] and "model" not in reply.arrays:
            raise WireError("its model is missing")

    def consume_reply(self, round: int, reply: Reply) -> None:
        """Consume the large arrays of a valid reply before `aggregate_fit`, if `streams_replies` is set.

        Called in order of client name. If the round does not count, `configure_fit` is called again.
        """

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Update `state` from the valid replies of a round, and return metrics for the history.

        By default, average the shared arrays, weighted by numbers of examples. `replies` are in order of client name;
        Flower's older API has another method of this name.
        """
        models = {client: reply.arrays["model"] for client, reply in replies.items() if "model" in reply.arrays}
        if models and self.traits.shares.averaged:
            weights = {client: float(replies[client].examples) for client in models}
            self.state.model = self.state.model | self.aggregator.average(models, weights)
        return {}

    # ---- results

    def size_of(self, client: str) -> str:
        """Return the size of a client's network in words, for the history; by default empty."""
        return ""

    def take_last(self, reply: Reply) -> None:
        """Check and keep a reply to the evaluation after the last round; raise a WireError to refuse it."""

    @property
    def has_global_model(self) -> bool:
        """Whether there is a `global_model` yet: by default, if clients share one network or the server trains one."""
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
        """Return matrices (JSON values) by name for the method's figures in the report."""
        return {}

    # ---- steps of a round

    def _prepare(self) -> None:
        """Settle the first values of shared arrays and the number of rounds, which depend on the present clients."""
        self._handshake.settle()
        if (rounds := self.number_of_rounds()) != self.config.rounds:
            self.run.override({"rounds": rounds})

    def _choose(self) -> dict[str, Payload]:
        """Choose the clients that train in the current round; return their payloads."""
        round = self.run.round
        chosen = self.federation.choose(self.state.clients if round.closing else self.participants(round.number))
        payloads = self._payloads(chosen, partial(self.configure_fit, round.number), "configure_fit")
        round.training = frozenset(payloads)
        return payloads

    def _payloads(
        self, clients: Sequence[str], hook: Callable[[Sequence[str]], dict[str, Payload]], name: str
    ) -> dict[str, Payload]:
        """Return the payloads of a hook, without clients that it asked a question and found lost."""
        with self._calling(name):
            payloads = hook(clients)
        return {client: payload for client, payload in payloads.items() if client in self.federation.roster.nodes}

    def _evaluation(self, clients: Sequence[str], *, amid_training: bool = False) -> list[Message]:
        """Return messages to clients that are only evaluated."""
        hook = partial(self.evaluation_payloads, amid_training=amid_training)
        payloads = self._payloads(clients, hook, "evaluation_payloads")
        return self.federation.messages(MessageType.EVALUATE, payloads, evaluate=True)

    def _check(self, reply: Reply) -> None:
        """Check the reply of a client that trained, and remove large arrays from it."""
        if reply.client in self.run.round.training:
            self.check_reply(reply)
            if self.streams_replies:
                self.consume_reply(self.run.round.number, reply)

    def _aggregate(self, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Aggregate the replies of clients that trained; a round with too few of them does not count."""
        round, metrics = self.run.round, dict[str, float]()
        trained = {client: reply for client, reply in replies.items() if client in round.training}
        if trained and len(trained) >= min(self.config.min_clients, len(round.training)):
            with self._calling("aggregate_fit"):
                before = self.state.model
                metrics = self.aggregate_fit(round.number, trained)
                changed = self.state.model is not before
                self.state.model = as_declared(self.state.model, self.federation.specs.values())
            if self.run.privacy and changed:
                self.run.privacy.spend(trained, before, self.state.model)
            for client in trained:
                self.state.clients[client].trained = round.number
        elif round.training:
            log.warning("round %d does not count: it has %d valid replies", round.number, len(trained))
            if round.number == 1 and not trained:
                raise FedhetError(f"no client gave a valid reply in the first round:\n{round.reasons()}")
        self.state.round = round.number
        return metrics

    @contextmanager
    def _calling(self, hook: str) -> Iterator[None]:
        """Context in which an unexpected exception becomes a FedhetError that names the hook and how to resume."""
        try:
            yield
        except FedhetError:
            raise
        except Exception as error:
            number = self.run.round.number
            raise FedhetError(
                f"round {number}: {hook} of {self.run.method.name} failed ({type(error).__name__}: {error}); a resumed "
                f"run continues after round {number - 1}, whose state was saved"
            ) from error

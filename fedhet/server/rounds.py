"""A round of a strategy. It is one exchange: evaluation rides in the training reply."""

from collections.abc import Mapping, Sequence
from functools import partial

from fedhet.errors import FedhetError
from fedhet.flower import Message, MessageType, MetricRecord
from fedhet.server.handshake import Handshake
from fedhet.server.hooks import Hooks, P, S
from fedhet.server.reporter import Reporter
from fedhet.server.run import Round
from fedhet.text import log
from fedhet.wire import Payload, Reply, as_declared


class Rounds(Hooks[P, S]):
    """Runs rounds with the hooks of a method.

    Attributes:
        reporter: reports rounds to observers.
    """

    reporter: Reporter
    _handshake: Handshake

    def run_round(self, round: int) -> MetricRecord:
        """Run one round and return its numbers; the round after the last one of training is the closing round."""
        run, federation = self.run, self.federation
        run.round = Round(round, closing=round > run.training_rounds)
        self._handshake.admit()  # clients that come late
        self._handshake.settle()

        payloads = self._choose()
        evaluate = run.round.closing or run.evaluates(round)
        epochs = self.config.closing_epochs if run.round.closing else self.config.local_epochs
        messages = federation.messages(MessageType.TRAIN, payloads, epochs=epochs, evaluate=evaluate)
        if evaluate:
            others = [client for client in federation.present if client not in payloads]
            messages += self._evaluation(others, amid_training=not run.round.closing)

        replies = federation.exchange(messages, self._check)
        metrics = self._aggregate(replies)
        return self.reporter.record(replies, metrics)

    def _choose(self) -> dict[str, Payload]:
        """Choose who trains in the round under way; returns what each receives."""
        round = self.run.round
        chosen = self.federation.choose(self.state.clients if round.closing else self.participants(round.number))
        payloads = self.federation.payloads(chosen, partial(self.configure_fit, round.number))
        round.training = frozenset(payloads)
        return payloads

    def _check(self, reply: Reply) -> None:
        """Check the reply of a client that trained, and remove large arrays from it."""
        if reply.client in self.run.round.training:
            self.check_reply(reply)
            if self.takes_in:
                self.take_in(self.run.round.number, reply)

    def _aggregate(self, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Aggregate what those sent who trained; a round with too few valid replies does not count."""
        round, metrics = self.run.round, dict[str, float]()
        trained = {client: reply for client, reply in replies.items() if client in round.training}
        if trained and len(trained) >= min(self.config.min_clients, len(round.training)):
            with self.federation.guarded(f"put together what clients {', '.join(trained)} sent"):
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
                raise FedhetError(f"no client did its part in the first round:\n{round.reasons()}")
        self.state.round = round.number
        return metrics

    def _evaluation(self, clients: Sequence[str], *, amid_training: bool = False) -> list[Message]:
        """Messages to clients that are only evaluated."""
        payloads = self.federation.payloads(clients, partial(self.evaluation_payloads, amid_training=amid_training))
        return self.federation.messages(MessageType.EVALUATE, payloads, evaluate=True)

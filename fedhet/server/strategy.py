"""The base of every strategy: Flower's hooks and the round loop. It does what all methods share.

It greets clients, draws who takes part, sends, waits, checks every reply, keeps order, counts bytes, and tells its
observers of every round. One round is one exchange: evaluation rides in the training reply.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedhet.errors import FedhetError
from fedhet.flower import decode_arrays, encode_arrays
from fedhet.flower.insides import simulated, wrapper_of
from fedhet.flower.wrappers import check_payloads, check_wrapped
from fedhet.observing import Observer, RunInfo
from fedhet.server import unseen
from fedhet.server.conversation import Conversation
from fedhet.server.half import P, S
from fedhet.server.roster import await_nodes
from fedhet.server.round import Round, metric_record, named, statistics, watch_validation
from fedhet.server.verdict import Verdict
from fedhet.wire import Reply

log = logging.getLogger("flwr").getChild("fedhet")

LAST = 3
"""So many last rounds in a row that did not count, or half of all, make a run a failed one."""

EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]


class FederatedStrategy(Conversation[P, S], Strategy):
    """Base of all strategies of fedhet; a `flwr.serverapp.strategy.Strategy` that starts on any Grid.

    Args:
        config: a complete configuration; or else
        settings: single keys by keyword, with `_` for `-`: the method's own (`eta0=0.01`) and shared ones
            (`learning_rate=0.05`).
        shared: the pool that all clients share, a `Pool`, or raw inputs (n, ...); sent to each once.
        model: the clients' models, where a method needs them at the server and they are not the configured ones.
        observers: told of every round.

    Raises:
        ConfigError: unknown or wrong settings, all at once.
    """

    def __init__(self, *args: Any, observers: Sequence[Observer] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.observers = list(observers)
        self._verdict = Verdict(self.traits.scored)
        self._on_common_test: MetricRecord | None = None

    # ---- the run

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFunction | None = None,
    ) -> Result:
        """Run all rounds, the closing round if there is one, and the evaluation at the end.

        Takes what Flower's own `start` takes; what is left out comes from the configuration. A strategy whose `state`
        was loaded goes on after `state.round`. With the key `out` and no observers, a run directory is written.

        Args:
            grid: the clients.
            initial_arrays: the shared model before the first round, for methods that have one and when nothing is
                resumed; by default the first client's initial weights.
            num_rounds: rounds of training.
            timeout: seconds to wait for replies.
            train_config: keys of the configuration to change, for training and the evaluation that rides with it;
                Flower's names (`lr`) are understood, and keys that are not fedhet's reach mods around the clients.
            evaluate_config: likewise; where both name a key, `train_config` wins.
            evaluate_fn: evaluates the global model at the server, before the first round and after each; its arrays are
                in Flower's format.

        Raises:
            FedhetError: too few clients can serve, none answered the first round, or the last rounds came to nothing;
                with their reasons. Or the method failed.
        """
        overrides = {"rounds": num_rounds, "timeout": None if timeout is None else float(timeout)}
        self._override({key: value for key, value in overrides.items() if value is not None})
        self._take({**(evaluate_config or {}), **(train_config or {})})
        self._grid, self._own_loop = grid, True
        for _, why in self.config.idle:
            log.warning("%s", why)
        with self._recording() if self.config.out and not self.observers else nullcontext():
            self._initial = {} if initial_arrays is None or self.state.round else decode_arrays(initial_arrays)
            try:
                result = self._run(grid, evaluate_fn)
            except BaseException as error:  # told and raised again, Ctrl-C included
                for observer in self.observers:
                    observer.failed(self._info(), error)
                raise
            finally:
                self._own_loop = False
            self._warn()
            done = self._info(matrices=self._matrices())
            for observer in self.observers:
                observer.finished(done)
            return result

    def _run(self, grid: Grid, evaluate_fn: EvaluateFunction | None) -> Result:
        result = Result()
        self.go(grid, 0)
        for observer in self.observers:
            observer.started(self._info(), self.state.round + 1, self.last_round)
        self._evaluate_globally(self.state.round, evaluate_fn, result)
        while (round := self.state.round + 1) <= self.last_round:
            result.train_metrics_clientapp[round] = self.go(grid, round)
            self._evaluate_globally(round, evaluate_fn, result)
        self._check_that_rounds_counted()
        result.evaluate_metrics_clientapp[self.last_round] = self.go(grid, self.last_round + 1)
        result.arrays = encode_arrays(self.state.model, flower=True)
        return result

    def go(self, grid: Grid, round: int) -> MetricRecord:
        """One round of `start`: from 1 to `last_round` one of training; 0 greets, the one after the last evaluates."""
        self._grid, self._own_loop = grid, True
        if not round:
            return self._gather(grid)
        if round > self.last_round:
            return self._evaluate_at_the_end(round, grid)
        messages = self.configure_train(round, ArrayRecord(), ConfigRecord(), grid)
        _, metrics = self.aggregate_train(round, self._send(messages))
        return metrics or MetricRecord()

    def _check_that_rounds_counted(self) -> None:
        """A run whose last rounds (`LAST`) all came to nothing is no finished run.

        Raises:
            FedhetError: it is such a run.
        """
        counted = max((client.trained for client in self.state.clients.values()), default=-1)
        if self.last_round - max(counted, 0) >= min(LAST, math.ceil(self.last_round / 2)) > 0:
            raise FedhetError(
                f"no round counted after round {max(counted, 0)} of {self.last_round}: too few clients gave a valid "
                f"reply (min-clients = {self.config.min_clients}):\n{self._round.reasons() or '  none was asked'}"
            )

    def _check_that_clients_can_be_scored(self) -> None:
        """Clients are evaluated on their own test parts, unless it is on the common test set alone.

        Raises:
            FedhetError: nobody has a test example.
        """
        if self.config.test_on == "global":
            return
        without = [client for client in self.present if not self.roster.greeted[client].test_examples]
        if without == self.present:
            raise FedhetError(
                f"no client has a test example, so nothing could be said of what is learnt (test-on = "
                f"{self.config.test_on}): give clients test parts, or a common test set with test-on = global"
            )
        if without:
            log.warning("%s: no test examples, so their own models are not scored", named(without))

    def _warn(self) -> None:
        """Say of a run that completed what is not as it should be."""
        for line in self._verdict.lines(
            trained={client: record.trained for client, record in self.state.clients.items()},
            metric=self.metric,
            outputs=self.outputs,
            rounds=self.last_round,
            rate=self.config.learning_rate,
        ):
            log.warning("%s", line)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        from fedhet.results.recorder import recorded

        folder, here = Path(self.config.out).resolve(), simulated(self._grid)
        with recorded(folder, self.config, "flwr", resume=self.config.resume, simulated=here) as observers:
            self.state = cast(S | None, observers[0].state(self.state_class)) or self.state
            self.observers = [*observers]
            yield

    # ---- Flower's hooks

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Flower's hook: the messages of a round. Within `start`, clients that do not train are evaluated with it."""
        self._grid = grid
        if not self._own_loop:
            self._take(config)
        closing = self._own_loop and server_round > self.training_rounds and self.config.closing_epochs > 0
        self._round = Round(server_round, closing=closing)
        if arrays:
            self._initial = decode_arrays(arrays)
        self._greet(grid)
        self._ready()
        drawn = list(self.state.clients) if closing else self.participants(server_round)
        for client in drawn:
            if client not in self.roster.nodes:
                self._round.fail(client, "is not there")
        asked = [client for client in self.roster.nodes if client in drawn]
        payloads = self._made_for(asked, partial(self.configure_fit, server_round))
        # A client may turn out to be lost when it is asked something on the way.
        payloads = {client: payload for client, payload in payloads.items() if client in self.roster.nodes}
        if not self._own_loop and (wrapper := wrapper_of(self)) is not None:
            shared = [self.specs[client] for client in self.present]
            check_wrapped(wrapper, self.name, self.traits, shared, arrays, self.config)
            check_payloads(wrapper, self.name, payloads)
        self._round.training = frozenset(payloads)
        evaluate = self._own_loop and (closing or self._evaluates(server_round))
        epochs = self.config.closing_epochs if closing else self.config.local_epochs
        messages = self._messages(MessageType.TRAIN, payloads, epochs=epochs, evaluate=evaluate)
        if evaluate:
            others = [client for client in self.roster.nodes if client not in payloads]
            beside = self._made_for(others, partial(self.evaluation_payloads, amid_training=not closing))
            messages += self._messages(MessageType.EVALUATE, beside, evaluate=True)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Flower's hook: checks the replies of a round, learns from them and completes the round."""
        valid = self._valid(replies, self._round.training)
        trained = {client: reply for client, reply in valid.items() if client in self._round.training}
        metrics: dict[str, float] = {}
        if trained and len(trained) >= min(self.config.min_clients, len(self._round.training)):
            with self._guarded(server_round, f"put together what clients {', '.join(trained)} sent"):
                metrics = self.aggregate_fit(server_round, trained)
            for client in trained:
                self.state.clients[client].trained = server_round
        elif self._round.training:
            log.warning("round %d does not count: it has %d valid replies", server_round, len(trained))
            if server_round == 1 and not trained:
                raise FedhetError(f"no client did its part in the first round:\n{self._round.reasons()}")
        self.state.round = server_round
        record = self._complete(valid, metrics)
        return (encode_arrays(self.state.model, flower=True) if self.state.model else None), record

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Flower's hook, for its own loop: an evaluation of all clients, an exchange of its own."""
        self._take(config)
        if not self._evaluates(server_round):
            return []
        payloads = self._made_for(self.present, partial(self.evaluation_payloads, amid_training=False))
        return self._messages(MessageType.EVALUATE, payloads, evaluate=True)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Flower's hook, for its own loop."""
        valid = self._valid(replies)
        return metric_record(statistics(valid, None)) if valid else None

    def summary(self) -> None:
        """Log what this strategy is."""
        log.info("%s: %s", self.name, self.parameters)

    def _gather(self, grid: Grid) -> MetricRecord:
        """Wait for clients and greet them: round 0."""
        await_nodes(grid, self.config)
        fresh = not self.state.clients
        self._round = Round()
        self._greet(grid)
        if len(self.present) < self.config.min_clients:
            raise FedhetError(
                f"{len(self.present)} clients can serve, and {self.config.min_clients} are needed (min-clients):\n"
                f"{self._round.reasons() or '  no more nodes came'}"
            )
        self._check_that_clients_can_be_scored()
        self._ready()
        return self._complete({}, {}) if fresh else MetricRecord()

    # ---- evaluation

    def _evaluate_at_the_end(self, number: int, grid: Grid) -> MetricRecord:
        self._round = Round(number, final=True)
        self._greet(grid)
        payloads = self._made_for(self.present, partial(self.evaluation_payloads, amid_training=False))
        sent = self._send(self._messages(MessageType.EVALUATE, payloads, evaluate=True))
        replies = self._valid(sent, payloads, check=self.take_last)
        if not self.config.unseen_clients:
            return self._complete(replies, {})
        known = dict(self.state.clients)
        came = self._meet_unseen_clients(grid)
        result = self._complete(
            replies, {}, unseen_clients=unseen.record(came, self.state.clients, self.config.unseen_epochs)
        )
        self.state.clients = known  # they had no part in what the run trained
        return result

    def _evaluate_globally(self, round: int, function: EvaluateFunction | None, result: Result) -> None:
        """The global model after a round, on the common test set: part of the next row, as what clients receive."""
        self._on_common_test = None
        if function and self.has_global_model and (round == self.last_round or self._evaluates(round + 1)):
            self._on_common_test = function(round, encode_arrays(self.state.model, flower=True))
            if self._on_common_test is not None:
                result.evaluate_metrics_serverapp[round] = self._on_common_test

    def _evaluates(self, round: int) -> bool:
        return round % self.config.evaluate_every == 0

    # ---- results

    def _info(self, **more: Any) -> RunInfo:
        return RunInfo(self.name, self.traits, self.state, self.metric, self.own_data, tuple(self.devices), **more)

    def _matrices(self) -> dict[str, Any]:
        try:
            return self.matrices()
        except Exception as error:  # pictures are no part of the result
            log.warning(
                "the report lacks what %s draws: %s: %s", self.name, type(error).__name__, error, exc_info=error
            )
            return {}

    def _complete(
        self, replies: Mapping[str, Reply], metrics: Mapping[str, float], **more: Mapping[str, Any]
    ) -> MetricRecord:
        """Tell the observers of the round, and what `more` there is in its row."""
        report = self._round.report(
            replies,
            metrics,
            clients=self.state.clients,
            scored=self.traits.scored,
            on_common_test=self._on_common_test,
        )
        report.row |= more
        self._verdict.take(report.row)
        if 0 < self._round.number < self.training_rounds:
            watch_validation(self.state, report.row, self.traits.scored, self.config.early_stopping)
        for observer in self.observers:
            observer.round(self._info(), report)
        return metric_record(report.row)

"""The base of every strategy: the round, the loop around it, and Flower's hooks.

One round is one exchange: evaluation rides in the training reply.
"""

import logging
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from fedhet import config as configuration
from fedhet import population, registry, supplied
from fedhet.data import PublicDataset
from fedhet.data.own import as_public_dataset
from fedhet.errors import FedhetError
from fedhet.flower import (
    ArrayRecord,
    ConfigRecord,
    Grid,
    Message,
    MessageType,
    MetricRecord,
    Result,
    Strategy,
    decode_arrays,
    encode_arrays,
)
from fedhet.flower.insides import simulated
from fedhet.flower.mods import check_hooks
from fedhet.flower.settings import settings_of
from fedhet.observing import Observer
from fedhet.options import Config, Value
from fedhet.server.aggregation import Aggregator
from fedhet.server.federation import Federation
from fedhet.server.handshake import Handshake
from fedhet.server.hooks import Hooks, P, S
from fedhet.server.networks import Networks
from fedhet.server.reporter import Reporter, metric_record, statistics, unseen_clients
from fedhet.server.roster import await_nodes
from fedhet.server.run import Round, Run
from fedhet.wire import Payload, Reply

log = logging.getLogger("flwr").getChild("fedhet")

LAST = 3
"""So many last rounds in a row that did not count, or half of all, make a run a failed one."""

EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]


class FederatedStrategy(Hooks[P, S], Strategy):
    """Base of all strategies of fedhet; a `flwr.serverapp.strategy.Strategy` that starts on any Grid.

    Args:
        config: a complete configuration; or else
        settings: single keys by keyword, with `_` for `-`: the method's own (`eta0=0.01`) and shared ones
            (`learning_rate=0.05`).
        public: the public dataset, a `PublicDataset`, or raw inputs (n, ...); sent to each client once.
        model: the clients' models, where a method needs them at the server and they are not the configured ones.
        observers: told of every round.

    Raises:
        ConfigError: unknown or wrong settings, all at once.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        public: PublicDataset | Tensor | None = None,
        model: Any = None,
        observers: Sequence[Observer] = (),
        **settings: Value,
    ) -> None:
        config = config or configuration.resolve(settings_of(type(self), settings))
        self.method = registry.method(config.method_name)
        state = self.state_class(run="" if config.state_dir else uuid.uuid4().hex[:12])
        dataset = population.public_dataset_for(
            config.method_name, registry.traits(config).public, as_public_dataset(public)
        )
        self.run = Run(self.method, config, state, dataset, supplied.model_function(model))
        self.federation = Federation(self.run)
        self.aggregator = Aggregator(self.run, self.federation)
        self.networks = Networks(self.run, type(self).__name__)
        self.reporter = Reporter(self.run, observers)
        self._handshake = Handshake(self)

    # ---- a round

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
                metrics = self.aggregate_fit(round.number, trained)
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
            train_config: keys of the configuration to change; Flower's names (`lr`) are understood, and keys that are
                not fedhet's reach mods around the clients.
            evaluate_config: likewise; where both name a key, `train_config` wins.
            evaluate_fn: evaluates the global model at the server, before the first round and after each; its arrays are
                in Flower's format.

        Raises:
            FedhetError: too few clients can serve, none answered the first round, or the last rounds came to nothing;
                with their reasons. Or the method failed.
        """
        overrides = {"rounds": num_rounds, "timeout": None if timeout is None else float(timeout)}
        self.run.override({key: value for key, value in overrides.items() if value is not None})
        self.run.take({**(evaluate_config or {}), **(train_config or {})})
        for _, why in self.config.idle:
            log.warning("%s", why)
        with self._recording(grid) if self.config.out and not self.reporter.observers else nullcontext():
            self.run.initial = {} if initial_arrays is None or self.state.round else decode_arrays(initial_arrays)
            try:
                with self.reporter.watching(self.matrices):
                    return self._all_rounds(grid, evaluate_fn)
            finally:
                self.run.flower = True

    def _all_rounds(self, grid: Grid, evaluate_fn: EvaluateFunction | None) -> Result:
        result, run = Result(), self.run
        self.handshake(grid)
        self.reporter.started()
        self._evaluate_globally(evaluate_fn, result)
        while self.state.round < run.last_round:
            round = self.state.round + 1
            result.train_metrics_clientapp[round] = self.run_round(round)
            self._evaluate_globally(evaluate_fn, result)
        self._check_that_rounds_counted()
        result.evaluate_metrics_clientapp[run.last_round] = self.evaluate_last()
        result.arrays = encode_arrays(self.state.model, flower=True)
        return result

    def handshake(self, grid: Grid) -> None:
        """Wait for clients and admit those that can serve; raises a FedhetError if too few can or none is scored."""
        exact = "clients" in self.config.chosen
        wanted = self.config.clients if exact else self.config.min_clients
        await_nodes(grid, wanted, exact=exact, patience=self.config.wait_for_clients)
        fresh = not self.state.clients
        self.federation.grid, self.run.flower, self.run.round = grid, False, Round()
        self.federation.one_by_one = self.takes_in
        self._handshake.admit()
        present = self.federation.present
        if len(present) < self.config.min_clients:
            raise FedhetError(
                f"{len(present)} clients can serve, and {self.config.min_clients} are needed (min-clients):\n"
                f"{self.run.round.reasons('no more nodes came')}"
            )
        self.federation.roster.check_that_clients_can_be_scored(self.config.test_on)
        self._handshake.settle()
        if fresh:
            self.reporter.record({}, {})

    def evaluate_last(self) -> MetricRecord:
        """Evaluate all clients after the last round, and let those join that come then; returns the numbers."""
        run, federation = self.run, self.federation
        run.round = Round(run.last_round + 1, final=True)
        self._handshake.admit()
        replies = federation.exchange(self._evaluation(federation.present), self.take_last)
        if not self.config.unseen_clients:
            return self.reporter.record(replies, {})
        known = dict(self.state.clients)
        joined = unseen_clients(self._handshake.join(), self.state.clients, self.config.unseen_epochs)
        result = self.reporter.record(replies, {}, unseen_clients=joined)
        self.state.clients = known  # they had no part in what the run trained
        return result

    def _evaluate_globally(self, function: EvaluateFunction | None, result: Result) -> None:
        """Evaluate the global model on the common test set, for the next record."""
        round, common = self.state.round, None
        if function and self.has_global_model and (round == self.run.last_round or self.run.evaluates(round + 1)):
            common = function(round, encode_arrays(self.state.model, flower=True))
            if common is not None:
                result.evaluate_metrics_serverapp[round] = common
        self.reporter.on_common_test = common

    def _check_that_rounds_counted(self) -> None:
        """Raise a FedhetError if the last rounds (`LAST`) of a run all came to nothing: it is no finished run."""
        last = self.run.last_round
        counted = max([0, *(client.trained for client in self.state.clients.values())])
        if last - counted >= min(LAST, math.ceil(last / 2)) > 0:
            raise FedhetError(
                f"no round counted after round {counted} of {last}: too few clients gave a valid reply (min-clients = "
                f"{self.config.min_clients}):\n{self.run.round.reasons('none was asked')}"
            )

    @contextmanager
    def _recording(self, grid: Grid) -> Iterator[None]:
        from fedhet.results.recorder import recorded

        folder = Path(self.config.out).resolve()
        with recorded(folder, self.config, "flwr", resume=self.config.resume, simulated=simulated(grid)) as observers:
            self.state = cast(S | None, observers[0].state(self.state_class)) or self.state
            self.reporter.observers = [*observers]
            yield

    # ---- Flower's hooks, for its own loop and its wrappers; there are no closing rounds in it

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Flower's hook: the messages of a round."""
        run, federation = self.run, self.federation
        run.take(config)
        federation.grid, federation.one_by_one, run.round = grid, self.takes_in, Round(server_round)
        if arrays:
            run.initial = decode_arrays(arrays)
        self._handshake.admit()
        self._handshake.settle()
        payloads = self._choose()
        specs = [federation.specs[client] for client in federation.present]
        check_hooks(self, self.method.name, run.traits, specs, arrays, run.config.wire_dtype, payloads)
        return federation.messages(MessageType.TRAIN, payloads, epochs=run.config.local_epochs)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Flower's hook: checks the replies of a round, learns from them and completes the round."""
        valid = self.federation.receive(replies, self._check)
        metrics = self.reporter.record(valid, self._aggregate(valid))
        return (encode_arrays(self.state.model, flower=True) if self.state.model else None), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Flower's hook: an evaluation of all clients, an exchange of its own."""
        self.run.take(config)
        return self._evaluation(self.federation.present) if self.run.evaluates(server_round) else []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Flower's hook: what all clients measured."""
        valid = self.federation.receive(replies)
        return metric_record(statistics(valid, None)) if valid else None

    def summary(self) -> None:
        """Log what this strategy is."""
        log.info("%s: %s", self.method.name, self.parameters)

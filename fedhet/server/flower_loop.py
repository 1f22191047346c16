"""Strategies in Flower's own loop (`Strategy.start`), or wrapped by a Flower strategy for differential privacy."""

import atexit
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

from fedhet.config.flower_names import to_send
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower import ArrayRecord, ConfigRecord, Grid, Message, MessageType, MetricRecord, Result, Strategy
from fedhet.flower.insides import PrivateWrapper, private_wrapper_of
from fedhet.flower.messages import decode_arrays, encode_arrays
from fedhet.flower.privacy import check_wrapper
from fedhet.messages import Reply
from fedhet.server.reporter import metric_record, own_metrics, statistics
from fedhet.server.round import Hooks, P, S
from fedhet.server.run import Round
from fedhet.utils.text import log

EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]

OFFERED = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")
"""Methods of Flower's `Strategy` that a subclass may override, besides `start` and `summary`."""

NOT_OFFERED = ("_construct_messages", "_check_and_log_replies", "initialize_parameters", "num_fit_clients")
"""Methods of Flower's `FedAvg` that a subclass must not define, since fedhet's strategies never call them."""


def _argument(name: str) -> property:
    """Return a read-only property for the argument `name` of Flower's `FedAvg`; setting it raises a ConfigError."""

    def read(strategy: "FlowerLoop[Any, Any]") -> Any:
        return getattr(strategy.run.flower_options, name, getattr(strategy.config, name, 1.0))

    def change(strategy: "FlowerLoop[Any, Any]", value: object) -> None:
        kind = type(strategy).__name__
        raise ConfigError(f"the argument {name} can be set only when the strategy is created: {kind}({name}={value!r})")

    return property(read, change)


class FlowerLoop(Hooks[P, S], Strategy):
    """Base class of `FederatedStrategy` with the methods that Flower's `Strategy.start` calls in each round.

    Attributes:
        private_wrapper: the Flower strategy for differential privacy that wraps this strategy, if any.
        evaluate_last, _restart, _running, _check_that_rounds_counted: methods of `FederatedStrategy`.
        _flowers_loop: the context managers of the current run in Flower's loop; None outside of such a run.
        _trained: the current round's valid replies by client, and its metrics; None before `aggregate_train`.
        _arrays: the global arrays at the beginning of the run and, as second element from round 1 on, the newest ones.
    """

    evaluate_last: Callable[[], MetricRecord]
    _restart: Callable[[], None]
    _running: Callable[[Grid, ArrayRecord | None], AbstractContextManager[None]]
    _check_that_rounds_counted: Callable[[], None]
    fraction_train, fraction_evaluate = _argument("fraction_train"), _argument("fraction_evaluate")
    min_train_nodes, min_evaluate_nodes = _argument("min_train_nodes"), _argument("min_evaluate_nodes")
    min_available_nodes, weighted_by_key = _argument("min_available_nodes"), _argument("weighted_by_key")
    arrayrecord_key, configrecord_key = _argument("arrayrecord_key"), _argument("configrecord_key")
    fresh = True
    private_wrapper: PrivateWrapper | None = None
    _flowers_loop: ExitStack | None = None
    _trained: tuple[Mapping[str, Reply], Mapping[str, float]] | None = None
    _arrays: tuple[ArrayRecord | None, ...] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if absent := [name for name in NOT_OFFERED if name in vars(cls)]:
            raise ConfigError(
                f"the class {cls.__name__} defines {absent[0]}, which fedhet's strategies never call: override one of "
                f"{', '.join(OFFERED)}, summary or start"
            )

    def _in_flowers_own_loop(
        self, grid: Grid, initial_arrays: ArrayRecord | None, evaluate_fn: EvaluateFunction | None
    ) -> Result:
        def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord | None:
            return evaluate_fn(round, arrays) if evaluate_fn and arrays and self.makes_global_model else None

        self._begin(grid, initial_arrays)
        with self._in_flowers_loop():
            run, first = self.run, encode_arrays(self.global_arrays(), flower=True)
            self._arrays = (first,)
            configs = ConfigRecord(run.train_config), ConfigRecord(run.evaluate_config)
            result = Strategy.start(self, grid, first, run.config.rounds, run.config.timeout, *configs, evaluate)
            if self._flowers_loop:  # aggregate_evaluate of a subclass did not call super()
                self._complete()
        return result

    def initialize_parameters(self, *_: object, **__: object) -> None:
        """Raise a ConfigError, since this method is called by servers of Flower's older interface only."""
        name = type(self).__name__
        raise ConfigError(
            f"{name} cannot run in a server_fn, start_server or start_simulation: start it in a ServerApp, by "
            f"app = ServerApp(), @app.main(), def main(grid, context): {name}().start(grid)"
        )

    def _begin(self, grid: Grid, initial_arrays: ArrayRecord | None) -> None:
        if self.config.resume or self.state.round:
            raise ConfigError(
                "a run in Flower's loop (of a wrapped strategy or overridden hooks) cannot be resumed: leave out resume"
            )
        self.private_wrapper, self._flowers_loop = private_wrapper_of(self), ExitStack()
        atexit.register(self._interrupted)  # an exception between two hooks is seen by none of them
        if self.config.closing_epochs:
            log.warning("closing-epochs has no effect in Flower's loop, which runs a wrapped strategy: leave it out")
        self.run.override({"closing-epochs": 0})
        with self._in_flowers_loop():
            self._flowers_loop.enter_context(self._running(grid, initial_arrays))
        self._arrays = (initial_arrays,)

    def _complete(self) -> None:
        self._check_that_rounds_counted()
        self.evaluate_last()
        self._end()

    def _end(self, error: BaseException | None = None) -> None:
        if (contexts := self._flowers_loop) is not None:
            self._flowers_loop, self.fresh = None, False
            atexit.unregister(self._interrupted)
            contexts.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def _interrupted(self) -> None:
        """Log an error and end the run as failed, if Flower's loop stopped before its last round."""
        if self._flowers_loop is not None:
            error = FedhetError(f"Flower's loop ended after round {self.state.round}: {self._same_rounds}")
            log.error("%s", error)
            with suppress(FedhetError):
                self._end(error)

    @property
    def _same_rounds(self) -> str:
        return f"set rounds of the strategy ({self.config.rounds}) and num_rounds of start to the same number"

    @contextmanager
    def _in_flowers_loop(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # also Ctrl-C
            self._end(error)
            raise

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Begin a round from the shared model `arrays`, and return the messages that ask clients to train."""
        self._trained = None
        if server_round == 1 and (self._flowers_loop is None or self.run.round.number):  # `start` has begun no run
            self._restart()
        elif self._flowers_loop is None:
            raise ConfigError(f"the run ended before Flower's loop reached round {server_round}: {self._same_rounds}")
        run, federation = self.run, self.federation
        config["server-round"] = server_round
        run.train_config = to_send("train_config", config)
        if not self._flowers_loop:
            self._begin(grid, arrays)
        with self._in_flowers_loop():
            self._take_arrays(arrays)
            payloads = self._open(Round(server_round))
            if self.private_wrapper:
                name = type(self.private_wrapper).__name__
                specs = [federation.specs[client] for client in federation.nodes]
                check_wrapper(name, self.method.name, run.traits, specs, arrays)
                if any(set(payload.arrays) != {"model"} or payload.values for payload in payloads.values()):
                    raise ConfigError(f"the wrapper {name} needs a method that sends only a model: set method = fedavg")
            evaluate = run.evaluates(server_round)
            return federation.messages(MessageType.TRAIN, payloads, epochs=run.config.local_epochs, evaluate=evaluate)

    def _take_arrays(self, arrays: ArrayRecord) -> None:
        """Set the shared model to Flower's `arrays`; if none is shared, raise a ConfigError for arrays that changed."""
        if self.traits.averages_model:
            self.run.initial = decode_arrays(arrays)
            self._initialise()
        elif arrays and not any(arrays is known for known in self._arrays):
            raise ConfigError(
                f"aggregate_train returned changed arrays, but clients of {self.method.name} share no averaged model: "
                "return the arrays of super().aggregate_train(server_round, replies)"
            )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the valid replies of a round of training, and return the new global arrays and the metrics."""
        with self._in_flowers_loop():
            if self.run.round.number != server_round:
                raise ConfigError(
                    f"configure_train of {type(self).__name__} must call super().configure_train(server_round, arrays, "
                    f"config, grid) in every round, but did not in round {server_round}"
                )
            valid = self.federation.receive(replies, self._check)
            self._trained = valid, self._aggregate(valid)
            metrics, model = metric_record(self.reporter.row(*self._trained)), self.global_arrays()
            self._arrays = (*self._arrays[:1], encode_arrays(model, flower=True) if model else None)
            return self._arrays[-1], metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return messages that evaluate all clients on `arrays`, to which a wrapping strategy may have added noise."""
        config["server-round"] = server_round
        self.run.evaluate_config = to_send("evaluate_config", config)
        with self._in_flowers_loop():
            if self._trained is None and type(self).aggregate_train is not FlowerLoop.aggregate_train:
                raise ConfigError(
                    f"aggregate_train of {type(self).__name__} must call super().aggregate_train(server_round, replies)"
                )
            self._take_arrays(arrays)
            return self._evaluation(list(self.federation.nodes)) if self.run.evaluates(server_round) else []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Record the round and return the mean metrics of clients' evaluations; after the last round, end the run."""
        with self._in_flowers_loop():
            valid, round = self.federation.receive(replies), self.run.round
            if self._trained is None:
                for client in round.training:
                    round.fail(client, "the reply was left out, as all replies of this round, since some client failed")
            self.reporter.record(*(self._trained or ({}, {})))
            if self._flowers_loop and round.number == self.run.last_round:
                self._complete()
        return metric_record({**statistics(valid, None), "metrics": own_metrics(valid, "evaluated")}) if valid else None

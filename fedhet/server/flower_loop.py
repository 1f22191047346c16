"""Strategies in Flower's own loop (`Strategy.start`), or wrapped by a Flower strategy for differential privacy."""

import atexit
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from typing import Any

from fedhet.config.flower_names import to_send
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower import ArrayRecord, ConfigRecord, Grid, Message, MetricRecord, Result, Strategy, newer_than_tested
from fedhet.flower.insides import private_wrapper_of
from fedhet.flower.messages import decode_arrays, encode_arrays
from fedhet.flower.privacy import check_wrapper
from fedhet.messages import Reply
from fedhet.server.claims import limited, weigh_evaluations
from fedhet.server.initial import check_initial_arrays, take_initial_arrays
from fedhet.server.loop import EvaluateFunction, Steps, StopFunction, finish, run_all, running
from fedhet.server.reporter import metric_record, own_metrics, statistics, train_record
from fedhet.server.run import Round, Run
from fedhet.utils.text import log

OFFERED = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")
"""Methods of Flower's `Strategy` that a subclass may override, besides `start` and `summary`."""

LEFT_OUT = " (or a hook of the strategy left the client out)"
"""Addition to the message that a client has not replied."""

NOT_OFFERED = ("_construct_messages", "_check_and_log_replies", "initialize_parameters", "num_fit_clients")
"""Methods of Flower's `FedAvg` that a subclass must not define, since fedhet's strategies never call them."""


def _argument(name: str) -> property:
    """Return a read-only property for the argument `name` of Flower's `FedAvg`; setting it raises a ConfigError."""

    def read(strategy: "FlowerInterface") -> Any:
        return getattr(strategy.run.flower_options, name, getattr(strategy.run.config, name, 1.0))

    def change(strategy: "FlowerInterface", value: object) -> None:
        kind = type(strategy).__name__
        raise ConfigError(f"the argument {name} can be set only when the strategy is created: {kind}({name}={value!r})")

    return property(read, change)


class FlowerLoop:
    """The adapter of a strategy to Flower's loop, which calls four methods in each round.

    `steps` is the strategy.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        # The contexts of the current run in Flower's loop; None outside of a run.
        self._contexts: ExitStack | None = None
        # The valid replies of the current round and its metrics; None before `aggregate_train`.
        self._trained: tuple[Mapping[str, Reply], Mapping[str, float]] | None = None
        # Whether a round began whose result was not taken in `configure_evaluate`, and which is not recorded.
        self.untaken = False
        self.unrecorded = False
        # The global arrays at the beginning of the run, and from round 1 on the newest ones.
        self._arrays: tuple[ArrayRecord | None, ...] = ()

    def run_all(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None,
        evaluate_fn: EvaluateFunction | None,
        should_stop: StopFunction | None,
    ) -> Result:
        """Run all rounds by Flower's `Strategy.start`, which calls the methods that a strategy's class overrides."""
        if should_stop and "should_stop" not in inspect.signature(Strategy.start).parameters:
            raise ConfigError("should_stop of a strategy that overrides Flower's hooks needs Flower 1.43: update flwr")

        def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord | None:
            return evaluate_fn(round, arrays) if evaluate_fn and arrays else None

        def stop(round: int, result: Result) -> bool:
            stopped = bool(should_stop and should_stop(round, result))
            if stopped:
                self.steps.run.state.stopped = round
            return stopped

        self._begin(grid, initial_arrays)
        with self._ended_by_errors():
            run = self.steps.run
            first = encode_arrays(self.steps.global_arrays(), flower=True)
            self._arrays = (first,)
            configs = ConfigRecord(run.train_config), ConfigRecord(run.evaluate_config)
            strategy: Any = self.steps
            functions = (evaluate, stop) if should_stop else (evaluate,)
            result = Strategy.start(strategy, grid, first, run.config.rounds, run.config.timeout, *configs, *functions)
            if self._contexts:  # should_stop ended the loop
                self._complete()
        return result

    def _begin(self, grid: Grid, initial_arrays: ArrayRecord | None) -> None:
        run = self.steps.run
        if run.config.resume or run.state.round:
            raise ConfigError(
                "a run in Flower's loop (of a wrapped strategy or overridden hooks) cannot be resumed: leave out resume"
            )
        run.private_wrapper = private_wrapper_of(self.steps)
        self._contexts = ExitStack()
        atexit.register(self.interrupted)  # an exception between two hooks is seen by none of them
        if run.config.closing_epochs:
            log.warning("closing-epochs has no effect in Flower's loop, which runs a wrapped strategy: leave it out")
        if run.config.keep_best or run.config.patience:
            log.warning("keep-best and patience have no effect in Flower's loop: leave them out")
        run.override({"closing-epochs": 0, "keep-best": False, "patience": 0})
        with self._ended_by_errors():
            self._contexts.enter_context(running(self.steps, grid, initial_arrays))
        self._arrays = (initial_arrays,)

    def _complete(self) -> None:
        finish(self.steps)
        self._end()

    def _end(self, error: BaseException | None = None) -> None:
        if (contexts := self._contexts) is not None:
            self._contexts = None
            atexit.unregister(self.interrupted)
            contexts.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def interrupted(self) -> None:
        """Log an error and end the run as failed, if Flower's loop stopped before its last round."""
        if self._contexts is not None:
            ended = f"Flower's loop ended after round {self.steps.run.state.round}"
            error = FedhetError(f"{ended}: {self._same_rounds}, and leave out should_stop")
            log.error("%s", error)
            with suppress(FedhetError):
                self._end(error)

    @property
    def _same_rounds(self) -> str:
        rounds = self.steps.run.config.rounds
        return f"set rounds of the strategy ({rounds}) and num_rounds of start to the same number"

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # also Ctrl-C
            self._end(error)
            raise

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._trained = None
        if server_round == 1 and (self._contexts is None or self.steps.run.round.number):  # `start` began no run
            self.steps.restart()
        elif self._contexts is None:
            raise ConfigError(f"the run ended before Flower's loop reached round {server_round}: {self._same_rounds}")
        run = self.steps.run
        config["server-round"] = server_round
        run.train_config = to_send("train_config", config)
        if self._contexts is None:
            self._begin(grid, arrays)
        with self._ended_by_errors():
            self.steps.admission.check_settings()  # the user's code may change `config` in each round
            self._take(arrays)
            run.round = Round(server_round)
            self.untaken = True
            self.unrecorded = True
            self.steps.admit_clients()
            with run.calling("participants"):
                clients = self.steps.participants(server_round)
            with run.calling("configure_fit"):
                payloads = self.steps.configure_fit(server_round, self.steps.federation.choose(clients))
            if run.private_wrapper:
                name = type(run.private_wrapper).__name__
                federation = self.steps.federation
                specs = [federation.specs[client] for client in federation.nodes]
                check_wrapper(name, run.method.name, run.traits, specs, arrays)
                if any(set(payload.arrays) != {"model"} or payload.values for payload in payloads.values()):
                    raise ConfigError(f"the wrapper {name} needs a method that sends only a model: set method = fedavg")
            return self.steps.federation.training(payloads, flower=True)

    def _take(self, arrays: ArrayRecord) -> None:
        """Set the shared model to Flower's `arrays`; if none is shared, raise a ConfigError for arrays that changed."""
        run = self.steps.run
        if run.traits.averages_model:
            run.initial = decode_arrays(arrays)
            take_initial_arrays(run, self.steps.federation)
        elif arrays and not any(arrays is earlier for earlier in self._arrays):
            raise ConfigError(
                f"aggregate_train returned changed arrays, but clients of {run.method.name} share no averaged model: "
                "return the arrays of super().aggregate_train(server_round, replies)"
            )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        steps = self.steps
        with self._ended_by_errors():
            if steps.run.round.number != server_round:
                raise ConfigError(
                    f"configure_train of {type(steps).__name__} must call super().configure_train(server_round, "
                    f"arrays, config, grid) in every round, but did not in round {server_round}"
                )
            valid = steps.federation.receive(replies, steps.check, LEFT_OUT)
            self._trained = valid, steps.aggregate(valid)
            metrics = train_record(steps.reporter.row(*self._trained), valid)
            model = steps.global_arrays()
            newest = encode_arrays(model, flower=True) if model else None
            self._arrays = (*self._arrays[:1], newest)
            return newest, metrics

    def take_evaluated(self, arrays: ArrayRecord) -> None:
        """Set the shared model to the round's result, and check that `aggregate_train` of a subclass made it."""
        self.untaken = False
        with self._ended_by_errors():
            if self._trained is None and "aggregate_train" in self.steps.overridden:
                name = type(self.steps).__name__
                raise ConfigError(f"aggregate_train of {name} must call super().aggregate_train(server_round, replies)")
            self._take(arrays)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        run = self.steps.run
        config["server-round"] = server_round
        run.evaluate_config = to_send("evaluate_config", config)
        self.take_evaluated(arrays)
        with self._ended_by_errors():
            if not run.evaluates_now:
                return []
            federation = self.steps.federation
            return federation.evaluation(self.steps.payloads_to_evaluate([*federation.nodes]), flower=True)

    def aggregate_evaluate(self, replies: Iterable[Message]) -> MetricRecord | None:
        steps = self.steps
        with self._ended_by_errors():
            valid = steps.federation.receive(replies, or_else=LEFT_OUT)
            known = steps.federation.known
            weights = {client: reply.weight for client, reply in valid.items() if known[client].report.wrapped}
            for client, weight in limited(steps.run.config, weights).items():
                # A hook of the user's strategy set another number of examples.
                if weight != valid[client].test_examples:
                    weigh_evaluations(valid[client], weight)
            round = steps.run.round
            if self._trained is None:
                for client in round.training:
                    round.fail(client, "all replies of this round were discarded, because another client failed")
            steps.reporter.record(*(self._trained or ({}, {})))
            self.unrecorded = False
            if self._contexts and round.number == steps.run.last_round:
                self._complete()
        if not valid:
            return None
        evaluated = statistics(valid, None, steps.run.metric)
        return metric_record({**evaluated, "metrics": own_metrics(valid, "evaluated")})


def _taking(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a subclass's `configure_evaluate` that takes the round's arrays also if it does not call `super()`."""

    @wraps(hook)
    def configure_evaluate(
        strategy: "FlowerInterface", server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Any:
        messages = hook(strategy, server_round, arrays, config, grid)
        if strategy._flower.untaken:
            strategy._flower.take_evaluated(arrays)
        return messages

    return configure_evaluate


def _recording(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a subclass's `aggregate_evaluate` that records the round also if it does not call `super()`."""

    @wraps(hook)
    def aggregate_evaluate(strategy: "FlowerInterface", server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        metrics = hook(strategy, server_round, replies)
        if strategy._flower.unrecorded:
            strategy._flower.aggregate_evaluate(replies)
        return metrics

    return aggregate_evaluate


class FlowerInterface(Strategy):
    """Base class of fedhet's strategies with the methods and attributes of Flower's `FedAvg`.

    `start` begins a run; the other methods pass the calls of Flower's loop, or of a strategy that wraps this one, to
    `FlowerLoop`.

    Attributes:
        run: the current run.
        on_common_test: the default of the argument `evaluate_fn` of `start`.
    """

    run: Run
    on_common_test: EvaluateFunction | None = None
    _flower: FlowerLoop
    fraction_train = _argument("fraction_train")
    fraction_evaluate = _argument("fraction_evaluate")
    min_train_nodes = _argument("min_train_nodes")
    min_evaluate_nodes = _argument("min_evaluate_nodes")
    min_available_nodes = _argument("min_available_nodes")
    weighted_by_key = _argument("weighted_by_key")
    arrayrecord_key = _argument("arrayrecord_key")
    configrecord_key = _argument("configrecord_key")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if absent := [name for name in NOT_OFFERED if name in vars(cls)]:
            raise ConfigError(
                f"the class {cls.__name__} defines {absent[0]}, which fedhet's strategies never call: override one of "
                f"{', '.join(OFFERED)}, summary or start"
            )
        for name, followed in (("configure_evaluate", _taking), ("aggregate_evaluate", _recording)):
            inherited = [getattr(base, name) for base in cls.__mro__[1:] if issubclass(base, FlowerInterface)]
            if (hook := getattr(cls, name)) not in inherited:  # the class's own, or of a mixin
                setattr(cls, name, followed(hook))

    @property
    def overridden(self) -> list[str]:
        """The names of those of the four methods of Flower's loop that the strategy's class overrides."""
        return [hook for hook in OFFERED if getattr(type(self), hook) is not getattr(FlowerInterface, hook)]

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFunction | None = None,
        should_stop: StopFunction | None = None,
    ) -> Result:
        """Run all rounds, the closing round if there is one, and the evaluation at the end.

        The arguments are the same as for Flower's `Strategy.start`; defaults come from the configuration. Every call
        begins a new run, unless `state` was assigned since the last run: then training continues after `state.round`.
        If the key `out` is set and there are no observers, a run directory is written. A subclass that overrides hooks
        of Flower's strategies, such as `configure_train`, runs in Flower's own loop.

        Args:
            grid: connection to the clients.
            initial_arrays: the shared model before the first round, unless a run is continued; by default the
                clients' initial weights.
            num_rounds: number of training rounds, including those of a run that is continued.
            timeout: seconds to wait for replies.
            train_config: entries for the clients' own train functions (`fedhet.wrap`) and mods, sent unchanged. At
                clients with fedhet's training loop, they set keys of training, also by Flower's names (`lr`).
            evaluate_config: entries for the clients' own evaluate functions, sent unchanged.
            evaluate_fn: evaluates the global model at the server, before the first round and after each round.
            should_stop: ends training if it returns True for a round and the results so far. Clients evaluate a global
                model in the next round, after which the function is called for the round before. A run that is
                interrupted after it returned True, and is resumed, trains on.

        Raises:
            FedhetError: too few clients can take part, no client gave a valid reply in the first round, the last rounds
                had too few valid replies, or the method failed.
        """
        steps = self._flower.steps
        steps.restart()
        run = steps.run
        overrides = {"rounds": num_rounds, "timeout": None if timeout is None else float(timeout)}
        run.override({key: value for key, value in overrides.items() if value is not None})
        run.train_config = to_send("train_config", train_config)
        run.evaluate_config = to_send("evaluate_config", evaluate_config)
        check_initial_arrays(run, initial_arrays)
        if remark := newer_than_tested():
            run.warn_once(remark)
        evaluate = (evaluate_fn or self.on_common_test) if steps.makes_global_model else None
        if evaluate_fn and not evaluate:
            run.warn_once(f"evaluate_fn is not called, since {run.method.name} has no global model: leave it out")
        if self.overridden:
            return self._flower.run_all(grid, initial_arrays, evaluate, should_stop)
        return run_all(steps, grid, initial_arrays, evaluate, should_stop)

    def summary(self) -> None:
        """Log the method's name and the values of its configuration keys."""
        run = self.run
        level = logging.DEBUG if self._flower.steps.reporter.observers else logging.INFO
        log.log(level, "%s: %s", run.method.name, run.config.options)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Begin a round from the shared model `arrays`, and return the messages that ask clients to train."""
        return self._flower.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the valid replies of a round of training, and return the new global arrays and the metrics."""
        return self._flower.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return messages that evaluate all clients on `arrays`, to which a wrapping strategy may have added noise."""
        return self._flower.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Record the round and return the mean metrics of clients' evaluations; after the last round, end the run."""
        return self._flower.aggregate_evaluate(replies)

    def initialize_parameters(self, *_: object, **__: object) -> None:
        """Raise a ConfigError, since this method is called by servers of Flower's older interface only."""
        name = type(self).__name__
        raise ConfigError(
            f"{name} cannot run in a server_fn, start_server or start_simulation: start it in a ServerApp, by "
            f"app = ServerApp(), @app.main(), def main(grid, context): {name}().start(grid)"
        )

"""The hooks through which Flower's own loop, or a Flower strategy that wraps another one, runs a fedhet strategy."""

import atexit
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

from fedhet.errors import ConfigError, FedhetError
from fedhet.flower import (
    ArrayRecord,
    ConfigRecord,
    Grid,
    Message,
    MessageType,
    MetricRecord,
    Strategy,
    decode_arrays,
    encode_arrays,
)
from fedhet.flower.insides import wrapper_of
from fedhet.flower.mods import check_hooks
from fedhet.flower.privacy import wrapper_ledger
from fedhet.messages import Reply
from fedhet.server.reporter import metric_record, statistics
from fedhet.server.round import Hooks, P, S
from fedhet.server.run import Round
from fedhet.utils.text import log


class FlowerLoop(Hooks[P, S], Strategy):
    """Runs a strategy in Flower's loop, which exchanges messages and calls `configure_train` and three more hooks."""

    _flowers_loop: ExitStack | None = None  # the contexts of a run
    _wrapper: Strategy | None = None  # around this strategy
    _trained: tuple[Mapping[str, Reply], Mapping[str, float]] | None = None  # replies and metrics of the current round

    @abstractmethod
    def handshake(self, grid: Grid) -> None:
        """Wait for clients and admit those that can serve."""

    @abstractmethod
    def evaluate_last(self) -> MetricRecord:
        """Evaluate all clients after the last round."""

    @abstractmethod
    def _recording(self, grid: Grid) -> AbstractContextManager[None]: ...

    @abstractmethod
    def _check_that_rounds_counted(self) -> None: ...

    def _begin(self, grid: Grid) -> None:
        """Begin a run at round 1, in Flower's loop or in a Flower strategy that wraps this one."""
        if self.config.resume:
            raise ConfigError("a run cannot be resumed if a Flower strategy wraps its strategy: leave out resume")
        self._flowers_loop, self._wrapper = ExitStack(), wrapper_of(self)
        atexit.register(self._interrupted)  # an exception between two hooks is seen by none of them
        if self.config.closing_epochs:
            log.warning("closing-epochs has no effect if a Flower strategy wraps fedhet's")
        self.run.override({"closing-epochs": 0})
        self._flowers_loop.enter_context(self._recording(grid))
        self._flowers_loop.enter_context(self.reporter.watching(self.matrices))
        self.handshake(grid)
        self.reporter.started()

    def _end(self, error: BaseException | None = None) -> None:
        """End a run in Flower's loop; `error` is the exception that ended it, if any."""
        if (contexts := self._flowers_loop) is not None:
            self._flowers_loop = None
            atexit.unregister(self._interrupted)
            contexts.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def _interrupted(self) -> None:
        """End a run that Flower's loop left before the last round."""
        if self._flowers_loop is not None:
            error = FedhetError(f"Flower's loop ended after round {self.state.round}: {self._same_rounds}")
            log.error("%s", error)
            with suppress(FedhetError):
                self._end(error)

    @property
    def _same_rounds(self) -> str:
        return f"give the strategy as many rounds (rounds = {self.config.rounds}) as start (num_rounds)"

    @contextmanager
    def _in_flowers_loop(self) -> Iterator[None]:
        """Context for a hook that Flower's loop calls: an exception in it ends the run."""
        try:
            yield
        except BaseException as error:  # also Ctrl-C
            self._end(error)
            raise

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages that ask clients to train in a round."""
        run, federation, self._trained = self.run, self.federation, None
        if server_round == 1:
            self._interrupted()  # an earlier run
        elif self._flowers_loop is None:
            raise ConfigError(f"the run ended before Flower's loop reached round {server_round}: {self._same_rounds}")
        run.take(config)
        if arrays:
            run.initial = decode_arrays(arrays)
        with self._in_flowers_loop():
            if not self._flowers_loop:
                self._begin(grid)
                mean = self.aggregator.plain
                run.privacy = wrapper_ledger(self._wrapper, run.traits, mean=mean) or run.privacy
            run.round = Round(server_round)
            self._handshake.admit()
            self._prepare()
            payloads = self._choose()
            specs = [federation.specs[client] for client in federation.present]
            check_hooks(self._wrapper, self.method.name, run.traits, specs, arrays, run.config.wire_dtype, payloads)
            evaluate = run.evaluates(server_round)
            return federation.messages(MessageType.TRAIN, payloads, epochs=run.config.local_epochs, evaluate=evaluate)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies of a round of training and aggregate them."""
        with self._in_flowers_loop():
            valid = self.federation.receive(replies, self._check)
            self._trained = valid, self._aggregate(valid)
            metrics = metric_record(self.reporter.row(*self._trained))
            return (encode_arrays(self.state.model, flower=True) if self.state.model else None), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return messages that evaluate all clients on `arrays`, to which a wrapping strategy may have added noise."""
        self.run.take(config)
        with self._in_flowers_loop():
            if arrays:
                self.run.initial = decode_arrays(arrays)
                self._handshake.settle()
            return self._evaluation(self.federation.present) if self.run.evaluates(server_round) else []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Record the evaluations of all clients, and complete the round; after the last round, complete the run."""
        with self._in_flowers_loop():
            valid, round = self.federation.receive(replies), self.run.round
            if self._trained is None:
                for client in round.training:
                    round.fail(client, "the reply was left out, as all replies of this round, since some client failed")
            self.reporter.record(*(self._trained or ({}, {})))
            if self._flowers_loop and round.number == self.run.last_round:
                self._check_that_rounds_counted()
                self.evaluate_last()
                self._end()
        return metric_record(statistics(valid, None)) if valid else None

"""The base class of all strategies, which runs a method from the handshake to the last evaluation."""

import logging
import math
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from fedhet.config import configuration
from fedhet.config.flower_names import FlowerOptions, settings_of, to_send
from fedhet.data import PublicDataset
from fedhet.data.own import as_public_dataset
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower import ArrayRecord, ConfigRecord, Grid, MetricRecord, Result
from fedhet.flower.insides import check_cluster_of, simulated
from fedhet.flower.messages import decode_arrays, encode_arrays
from fedhet.flower.privacy import PrivacyLedger, mod_ledger, wrapper_ledger
from fedhet.messages.protocol import JOIN
from fedhet.methods import registry
from fedhet.methods.options import Config, Value
from fedhet.results.observers import Observer
from fedhet.results.recorder import RunDirectory, recorded
from fedhet.results.terminal import ProgressLine
from fedhet.server.aggregation import Aggregator
from fedhet.server.federation import Federation, await_nodes
from fedhet.server.flower_loop import OFFERED, EvaluateFunction, FlowerLoop
from fedhet.server.handshake import Handshake
from fedhet.server.reporter import Reporter, unseen_clients
from fedhet.server.round import P, S
from fedhet.server.run import Round, Run, named, run_folder
from fedhet.setup import user_functions
from fedhet.utils.process import standard_settings
from fedhet.utils.randomness import seeded
from fedhet.utils.text import console, log


class FederatedStrategy(FlowerLoop[P, S]):
    """The base class of all strategies: a `flwr.serverapp.strategy.Strategy` that runs on any Flower Grid.

    Args:
        config: a complete configuration, or None if keys are given by keyword.
        settings: configuration keys as keyword arguments, with `_` for `-`: keys of the method (`eta0=0.01`) and keys
            that all methods have (`learning_rate=0.05`); also arguments of Flower's `FedAvg`, such as
            `min_train_nodes` and `weighted_by_key` (`fedhet.config.flower_names.FlowerOptions`).
        public: the public dataset, as a `PublicDataset` or raw inputs (n, ...); it is sent to each client once.
        model: the clients' models; needed if they are not the configured ones and the method builds them at the server.
        observers: objects that are notified of every round.

    Attributes:
        on_common_test: the default of the argument `evaluate_fn` of `start`.

    Raises:
        ConfigError: settings are unknown or invalid; the message lists all of them.
    """

    on_common_test: EvaluateFunction | None = None
    _directory: RunDirectory | None = None  # of the current run, if it writes one

    def __init__(
        self,
        config: Config | None = None,
        *,
        public: PublicDataset | Tensor | None = None,
        model: Any = None,
        observers: Sequence[Observer] = (),
        **settings: Value,
    ) -> None:
        if config is not None and not isinstance(config, Config):
            name = type(self).__name__
            raise ConfigError(f"pass settings by keyword, such as {name}(fraction_train=0.5), not as {config!r:.80}")
        options = FlowerOptions()
        if config is None:
            given, options = settings_of(type(self), settings)
            config = configuration.resolve(given)
        self.method = registry.method(config.method_name)
        dataset, need = as_public_dataset(public), registry.traits(config).public
        if dataset and need == "labelled" and dataset.labels is None:
            name = config.method_name
            raise ConfigError(f"{name} needs labels of the public dataset, which has only inputs: add labels")
        if dataset and need != "labelled":
            dataset = dataset.unlabelled if need == "inputs" else None
        function = user_functions.model_function(model)
        self._new_run = partial(Run, self.method, config, public=dataset, model=function, flower_options=options)
        self._renew(observers)

    def _renew(self, observers: Sequence[Observer], spent: PrivacyLedger | None = None) -> None:
        """Create the objects for a new run; `spent` records the privacy budget of the strategy's earlier runs."""
        self.run = self._new_run(state=self.state_class(run=uuid.uuid4().hex), privacy=spent)
        self.federation = Federation(self.run)
        self.aggregator = Aggregator(self.run, self.federation)
        self.reporter = Reporter(self.run, self.size_of, observers)
        self.federation.answered = self.reporter.answered
        self._admit_clients = Handshake(self).admit
        self.fresh, self.private_wrapper = True, None

    def _restart(self) -> None:
        """Begin a new run; if `state` was assigned since the last run, training continues from it instead.

        A run in Flower's loop that stopped within a round is ended first.
        """
        self._interrupted()
        if not self.fresh:
            self._renew(self.reporter.observers, self.run.privacy)

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

        Raises:
            FedhetError: too few clients can take part, no client gave a valid reply in the first round, the last rounds
                had too few valid replies, or the method failed.
        """
        self._restart()
        overrides = {"rounds": num_rounds, "timeout": None if timeout is None else float(timeout)}
        self.run.override({key: value for key, value in overrides.items() if value is not None})
        self.run.train_config = to_send("train_config", train_config)
        self.run.evaluate_config = to_send("evaluate_config", evaluate_config)
        evaluate = evaluate_fn or self.on_common_test
        if evaluate_fn and not self.makes_global_model:
            self.run.warn_once(f"evaluate_fn is not called, since {self.method.name} has no global model: leave it out")
        if initial_arrays is not None and not isinstance(initial_arrays, ArrayRecord):
            raise ConfigError(
                f"initial_arrays must be a flwr.app.ArrayRecord, such as ArrayRecord(model.state_dict()), not a "
                f"{type(initial_arrays).__name__}"
            )
        if initial_arrays and self.traits.shares.keys != "nothing" and not self.traits.shares.averaged:
            raise ConfigError(
                f"method {self.method.name} has no shared model that initial_arrays could set: leave them out, and let "
                "the clients' model function set initial weights"
            )
        if any(getattr(type(self), hook) is not getattr(FlowerLoop, hook) for hook in OFFERED):
            return self._in_flowers_own_loop(grid, initial_arrays, evaluate)
        for key, why in self.config.remarks:
            log.log(logging.INFO if key == "test-on" else logging.WARNING, "%s", why)
        self.summary()
        self.run.flower = False
        try:
            with self._running(grid, initial_arrays, lines=True):
                return self._all_rounds(evaluate)
        finally:
            self.run.flower, self.fresh = True, False

    @contextmanager
    def _running(self, grid: Grid, initial_arrays: ArrayRecord | None, *, lines: bool = False) -> Iterator[None]:
        """Context manager of a run, which begins with the handshake; prints a line per round if `lines` is true."""
        with standard_settings(), self._recording(grid, lines), self.reporter.watching():
            if initial_arrays and not self.state.round:
                if self.traits.averages_model:
                    self.run.initial = decode_arrays(initial_arrays)
                else:
                    name = self.method.name
                    self.run.warn_once(f"initial_arrays have no effect, since clients of {name} share no model")
            self.handshake(grid)
            self.reporter.started()
            yield

    def _all_rounds(self, evaluate_fn: EvaluateFunction | None) -> Result:
        result, run = Result(), self.run
        self._evaluate_globally(evaluate_fn, result)
        while self.state.round < run.last_round:
            round = self.state.round + 1
            result.train_metrics_clientapp[round] = self.run_round(round)
            evaluated = round - (self.traits.scored == "received")  # the round whose model was evaluated
            if evaluated and self.reporter.evaluated:
                result.evaluate_metrics_clientapp[evaluated] = self.reporter.evaluated
            self._evaluate_globally(evaluate_fn, result)
        self._check_that_rounds_counted()
        result.evaluate_metrics_clientapp[run.last_round] = self.evaluate_last()
        result.arrays = encode_arrays(self.global_arrays(), flower=True)
        return result

    def handshake(self, grid: Grid) -> None:
        """Wait for clients and admit those that can take part; raise a FedhetError if there are too few."""
        check_cluster_of(grid)
        exact = "clients" in self.config.chosen
        least = max(self.config.min_clients, self.run.flower_options.least)
        wanted = self.config.clients if exact else least
        await_nodes(grid, wanted, exact=exact, patience=self.config.wait_for_clients)
        fresh = not self.state.clients
        self.federation.grid, self.run.round = grid, Round()
        self._admit_clients()
        present = self.federation.nodes
        if len(present) < least:
            raise FedhetError(
                f"only {len(present)} clients can take part, but {least} are needed; start more clients or lower "
                f"min-clients:\n{self.run.round.reasons('no more nodes came')}"
            )
        gone = [client for client in self.state.clients if client not in present]
        if gone and self.federation.simulated:
            raise FedhetError(
                f"the run cannot continue without {named(gone)}, which took part before; remove the causes:\n"
                f"{self.run.round.reasons('no such node')}"
            )
        if self._directory and self.run.train_config:
            self._directory.reconfigure(self.config)
        self._prepare()
        self._account()
        if fresh:
            self.reporter.record({}, {})

    def _account(self) -> None:
        """Set `run.privacy`, the record of the privacy budget that this and the strategy's earlier runs spend."""
        run, earlier = self.run, self.run.privacy
        if wrapper := self.private_wrapper:
            run.privacy = wrapper_ledger(wrapper, run.traits, mean=self.aggregator.plain, earlier=earlier)
        elif any(run.noise.values()):
            run.privacy = mod_ledger(run.noise, run.traits, 0 if earlier else self.state.round, earlier)
        elif earlier:
            why = "a later run adds no noise"
            run.privacy = PrivacyLedger(earlier.name, run.traits, lambda *_: why, earlier=earlier)

    def evaluate_last(self) -> MetricRecord:
        """Evaluate all clients after the last round, and unseen clients, which join only then; return mean metrics."""
        run, federation = self.run, self.federation
        run.round = Round(run.last_round + 1, final=True)
        self._admit_clients()
        replies = federation.exchange(self._evaluation(list(federation.nodes)))
        if not self.config.unseen_clients:
            return self.reporter.record(replies, {})
        known, present = dict(self.state.clients), set(federation.nodes)
        self._admit_clients(unseen=True)
        new = [client for client in federation.nodes if client not in present]
        payloads = self._payloads("evaluation_payloads", new, amid_training=False)
        for client in [c for c in payloads if self.traits.communicates and not payloads[c].arrays]:
            del payloads[client]
            reason = f"{self.method.name} has no arrays for the client: no client that trained has the same layers"
            run.round.fail(client, reason)
        run.round.training = frozenset(payloads)
        joined = federation.ask(JOIN, payloads) if payloads else {}
        curves = unseen_clients(joined, self.state.clients, self.config.unseen_epochs)
        result = self.reporter.record(replies, {}, unseen_clients=curves)
        self.state.clients = known  # the unseen clients had no part in what the run trained
        return result

    def _evaluate_globally(self, function: EvaluateFunction | None, result: Result) -> None:
        """Evaluate the global model with `function`; add metrics to `result`, and keep them for the round's record."""
        round, common = self.state.round, None
        if function and self.has_global_model and (round == self.run.last_round or self.run.evaluates(round + 1)):
            with seeded(self.config.seed, "evaluation", "server"):
                common = function(round, encode_arrays(self.global_arrays(), flower=True))
            if common is not None:
                if not isinstance(common, MetricRecord):
                    kind = type(common).__name__
                    raise ConfigError(f"evaluate_fn must return a flwr.app.MetricRecord or None, but returned a {kind}")
                result.evaluate_metrics_serverapp[round] = common
        self.reporter.on_common_test = common

    def _check_that_rounds_counted(self) -> None:
        """Raise a FedhetError if the last 3 rounds (or the last half, if that is fewer) had too few valid replies."""
        last = self.run.last_round
        counted = max([0, *(client.trained for client in self.state.clients.values())])
        if last - counted >= min(3, math.ceil(last / 2)) > 0:
            raise FedhetError(
                f"all rounds after round {counted} of {last} had fewer than {self.config.min_clients} valid replies; "
                f"correct the causes, or lower min-clients:\n{self.run.round.reasons('no client was asked')}"
            )
        if last and self.traits.whole and not self.has_global_model:
            raise FedhetError(
                f"method {self.method.name} has no global model after round {last}, since rounds had too few valid "
                "replies: resume the run with more rounds"
            )

    @contextmanager
    def _recording(self, grid: Grid, lines: bool) -> Iterator[None]:
        """Context manager that records a run and, if `lines`, prints progress; no effect if the run has observers."""
        if self.reporter.observers:
            yield
            return
        folder = run_folder(self.config, grid) if self.config.out else None
        shown = [ProgressLine(console(force_terminal=False), folder)] * lines
        with ExitStack() as stack:
            self.reporter.observers = [*shown]
            if folder:
                opened = recorded(folder, self.config, "flwr", resume=self.config.resume, simulated=simulated(grid))
                observers = stack.enter_context(opened)
                self._directory = observers[0]
                self.state = observers[0].resumed(self.state)
                self.reporter.observers = [*observers, *shown]
            try:
                yield
            finally:
                self.reporter.observers, self._directory = [], None

    def summary(self) -> None:
        """Log the method's name and the values of its configuration keys."""
        level = logging.DEBUG if self.reporter.observers else logging.INFO
        log.log(level, "%s: %s", self.method.name, self.options)

"""The base class of all strategies, which runs a method from the handshake to the last evaluation."""

import logging
import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fedhet.config import client_setup, configuration, user_functions
from fedhet.data import PublicDataset
from fedhet.data.own import as_public_dataset
from fedhet.errors import FedhetError
from fedhet.flower import ArrayRecord, ConfigRecord, Grid, MetricRecord, Result, decode_arrays, encode_arrays
from fedhet.flower.grid import LocalGrid
from fedhet.flower.insides import simulated
from fedhet.flower.privacy import mod_ledger
from fedhet.flower.settings import settings_of
from fedhet.messages import Reply
from fedhet.messages.protocol import JOIN
from fedhet.methods import registry
from fedhet.methods.options import Config, Value
from fedhet.results.observers import Observer
from fedhet.server.aggregation import Aggregator
from fedhet.server.federation import Federation
from fedhet.server.flower_loop import FlowerLoop
from fedhet.server.handshake import Admission, Handshake
from fedhet.server.networks import Networks
from fedhet.server.reporter import Reporter, unseen_clients
from fedhet.server.roster import await_nodes
from fedhet.server.round import P, S
from fedhet.server.run import Round, Run, named
from fedhet.utils.randomness import seeded
from fedhet.utils.text import log

LAST = 3
"""A run fails if this many last rounds, or the last half of all rounds, did not count."""

EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]


class FederatedStrategy(FlowerLoop[P, S]):
    """The base class of all strategies: a `flwr.serverapp.strategy.Strategy` that runs on any Flower Grid.

    `round.py` defines the hooks of methods and the round that calls them, `flower_loop.py` the hooks that Flower calls.

    Args:
        config: a complete configuration, or None if keys are given by keyword.
        settings: configuration keys as keyword arguments, with `_` for `-`: keys of the method (`eta0=0.01`) and keys
            that all methods have (`learning_rate=0.05`).
        public: the public dataset, as a `PublicDataset` or raw inputs (n, ...); it is sent to each client once.
        model: the clients' models; needed if they are not the configured ones and the method builds them at the server.
        observers: objects that are notified of every round.

    Raises:
        ConfigError: settings are unknown or invalid; the message lists all of them.
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
        state = self.state_class(run=uuid.uuid4().hex)
        dataset = client_setup.public_dataset_for(
            config.method_name, registry.traits(config).public, as_public_dataset(public)
        )
        self.run = Run(self.method, config, state, dataset, user_functions.model_function(model))
        self.federation = Federation(self.run)
        self.aggregator = Aggregator(self.run, self.federation)
        self.networks = Networks(self.run, type(self).__name__)
        self.reporter = Reporter(self.run, self.size_of, observers)
        hooks = self.public_dataset, self.compatibility, self.common, self.admit, self.first_arrays, self.first_model
        self._handshake = Handshake(self.run, self.federation, Admission(*hooks, self.copies))

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

        The arguments are the same as for Flower's `Strategy.start`; defaults come from the configuration. A strategy
        whose `state` was loaded continues after `state.round`. If the key `out` is set and there are no observers, a
        run directory is written.

        Args:
            grid: connection to the clients.
            initial_arrays: the shared model before the first round, unless a run is resumed; by default the first
                client's initial weights.
            num_rounds: number of training rounds.
            timeout: seconds to wait for replies.
            train_config: keys of the configuration to change, also by Flower's names (`lr`); unknown keys are sent to
                the clients, for Flower mods that read them.
            evaluate_config: further keys, used like `train_config`, which has precedence.
            evaluate_fn: evaluates the global model at the server, before the first round and after each round.

        Raises:
            FedhetError: too few clients can serve, no client gave a valid reply in the first round, the last rounds did
                not count, or the method failed.
        """
        overrides = {"rounds": num_rounds, "timeout": None if timeout is None else float(timeout)}
        self.run.override({key: value for key, value in overrides.items() if value is not None})
        self.run.take({**(evaluate_config or {}), **(train_config or {})})
        for key, why in self.config.remarks:
            log.log(logging.INFO if key == "test-on" else logging.WARNING, "%s", why)
        with self._recording(grid):
            self.run.initial = {} if initial_arrays is None or self.state.round else decode_arrays(initial_arrays)
            try:
                with self.reporter.watching(self.matrices):
                    return self._all_rounds(grid, evaluate_fn)
            finally:
                self.run.flower = True

    def _all_rounds(self, grid: Grid, evaluate_fn: EvaluateFunction | None) -> Result:
        result, run = Result(), self.run
        run.flower = False
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
        """Wait for clients and admit those that can serve; raise a FedhetError if there are too few."""
        exact = "clients" in self.config.chosen
        wanted = self.config.clients if exact else self.config.min_clients
        await_nodes(grid, wanted, exact=exact, patience=self.config.wait_for_clients)
        fresh = not self.state.clients
        self.federation.grid, self.run.round = grid, Round()
        self._handshake.admit()
        present = self.federation.present
        if len(present) < self.config.min_clients:
            raise FedhetError(
                f"{len(present)} clients can serve, and {self.config.min_clients} are needed (min-clients):\n"
                f"{self.run.round.reasons('no more nodes came')}"
            )
        gone = [client for client in self.state.clients if client not in present]
        if gone and (simulated(grid) or isinstance(grid, LocalGrid)):  # all nodes are there
            raise FedhetError(f"{named(gone)} cannot continue this run:\n{self.run.round.reasons('no such node')}")
        self.federation.roster.check_that_clients_can_be_scored(self.config.test_on)
        self._prepare()
        if any(self.run.noise.values()):
            self.run.privacy = mod_ledger(self.run.noise, self.run.traits, self.state.round)
        if fresh:
            self.reporter.record({}, {})

    def evaluate_last(self) -> MetricRecord:
        """Evaluate all clients after the last round, admit unseen clients, and return metrics."""
        run, federation = self.run, self.federation
        run.round = Round(run.last_round + 1, final=True)
        self._handshake.admit()
        replies = federation.exchange(self._evaluation(federation.present), self.take_last)
        if not self.config.unseen_clients:
            return self.reporter.record(replies, {})
        known = dict(self.state.clients)
        joined = unseen_clients(self._join_unseen(), self.state.clients, self.config.unseen_epochs)
        result = self.reporter.record(replies, {}, unseen_clients=joined)
        self.state.clients = known  # they had no part in what the run trained
        return result

    def _join_unseen(self) -> dict[str, Reply]:
        known = set(self.federation.present)
        self._handshake.admit(unseen=True)
        new = [client for client in self.federation.present if client not in known]
        payloads = self._payloads(new, partial(self.evaluation_payloads, amid_training=False), "evaluation_payloads")
        if self.traits.communicates:
            for client in [client for client, payload in payloads.items() if not payload.arrays]:
                del payloads[client]
                reason = f"{self.method.name} has no arrays for the client: no client that trained has the same layers"
                self.run.round.fail(client, reason)
        self.run.round.joining = frozenset(payloads)
        return self.federation.ask(JOIN, payloads) if payloads else {}

    def _evaluate_globally(self, function: EvaluateFunction | None, result: Result) -> None:
        """Evaluate the global model at the server with `function`, for the record of the next round."""
        round, common = self.state.round, None
        if function and self.has_global_model and (round == self.run.last_round or self.run.evaluates(round + 1)):
            with seeded(self.config.seed, "evaluation", "server"):
                common = function(round, encode_arrays(self.state.model, flower=True))
            if common is not None:
                result.evaluate_metrics_serverapp[round] = common
        self.reporter.on_common_test = common

    def _check_that_rounds_counted(self) -> None:
        """Raise a FedhetError if too many rounds at the end of the run did not count (see `LAST`)."""
        last = self.run.last_round
        counted = max([0, *(client.trained for client in self.state.clients.values())])
        if last - counted >= min(LAST, math.ceil(last / 2)) > 0:
            raise FedhetError(
                f"no round counted after round {counted} of {last}: too few clients gave a valid reply (min-clients = "
                f"{self.config.min_clients}):\n{self.run.round.reasons('no client was asked')}"
            )
        if last and self.traits.whole and not self.has_global_model:
            raise FedhetError(
                f"{self.method.name} has no global model after round {last}, since some rounds did not count: resume "
                "the run with more rounds"
            )

    @contextmanager
    def _recording(self, grid: Grid) -> Iterator[None]:
        from fedhet.results.recorder import recorded

        if not self.config.out or self.reporter.observers:
            yield
            return
        folder = Path(self.config.out).resolve()
        with recorded(folder, self.config, "flwr", resume=self.config.resume, simulated=simulated(grid)) as observers:
            self.state = observers[0].resumed(self.state)
            self.reporter.observers = [*observers]
            try:
                yield
            finally:
                self.reporter.observers = []

    def summary(self) -> None:
        """Log the method's name and its parameters."""
        log.info("%s: %s", self.method.name, self.options)

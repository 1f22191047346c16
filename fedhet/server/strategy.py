"""The base class of all strategies: a method's hooks, and a run from the handshake to the last evaluation."""

import math
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar, cast, get_args

from torch import Tensor, nn

from fedhet.config import configuration
from fedhet.config.flower_names import FlowerOptions, settings_of
from fedhet.data import PublicDataset
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower import Grid, MetricRecord
from fedhet.flower.privacy import PrivacyLedger
from fedhet.messages import Arrays, Payload, Reply, Spec, WireError, as_declared, load_into
from fedhet.methods import registry
from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Config, Options, Value
from fedhet.results.observers import Observer
from fedhet.results.state import State
from fedhet.server.aggregation import Aggregator
from fedhet.server.federation import Federation
from fedhet.server.flower_loop import FlowerInterface, FlowerLoop
from fedhet.server.handshake import Common, Handshake
from fedhet.server.initial import global_model_in, request_missing_arrays, take_initial_arrays
from fedhet.server.reporter import Reporter
from fedhet.server.run import Round, Run, public_for
from fedhet.setup import user_functions
from fedhet.utils.randomness import numpy_generator
from fedhet.utils.statistics import in_order
from fedhet.utils.text import log

P = TypeVar("P", bound=Options)
S = TypeVar("S", bound=State)


def _numbers(metrics: object) -> dict[str, float]:
    """Return what `aggregate_fit` returned, with NumPy's and PyTorch's numbers as Python's; raise a TypeError."""
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise TypeError(f"it returned {metrics!r:.80}: return a dict of metrics by name, {{}} for none")
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        item = getattr(value, "item", None)
        number = item() if item and math.prod(value.shape) == 1 else value
        if not isinstance(number, int | float):
            raise TypeError(f"its metric {name!r} is {value!r:.80}: return a number")
        numbers[name] = number
    return numbers


class FederatedStrategy(FlowerInterface, Generic[P, S]):
    """The base class of all strategies: a `flwr.serverapp.strategy.Strategy` that runs on any Flower Grid.

    A method overrides hooks, from `common` to `global_model`, whose defaults implement FedAvg.

    Args:
        config: a complete configuration, or None if keys are given by keyword.
        settings: configuration keys as keyword arguments, with `_` for `-`: keys of the method (`eta0=0.01`) and keys
            that all methods have (`learning_rate=0.05`); also arguments of Flower's `FedAvg`, such as
            `min_train_nodes` and `weighted_by_key` (`fedhet.config.flower_names.FlowerOptions`).
        public: the public dataset, as a `PublicDataset` or raw inputs (n, ...); it is sent to each client once.
        model: the clients' models; needed if they are not the configured ones and the method builds them at the server.
        observers: objects that are notified of every round.

    Attributes:
        role: "server", which distinguishes strategies from client classes.
        method: the declaration of the method: its name, its configuration keys, and what it needs and exchanges.
        state_class: class of `state`; by default the one in brackets, as in `FederatedStrategy[MyOptions, MyState]`.
        copies: number of copies of each client's network that the server has in memory.
        fresh: whether no run has used `state` yet, so that the next run starts from it.
        run: the configuration, the state and the current `Round`, in which failures and bytes are counted.
        federation, aggregator, reporter: the run's clients, the aggregation of arrays, and the reports to observers.
        admission: the handshake with new clients.

    Raises:
        ConfigError: settings are unknown or invalid; the message lists all of them.
    """

    role: ClassVar[str] = "server"
    method: Method
    state_class: ClassVar[type[State]] = State
    copies: ClassVar[int] = 0

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
        dataset = public_for(config, public)
        function = user_functions.model_function(model)
        self._new_run = partial(Run, self.method, config, public=dataset, model=function, flower_options=options)
        self._flower = FlowerLoop(self)
        self._renew(observers)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        bases = vars(cls).get("__orig_bases__", ()) if "state_class" not in vars(cls) else ()
        for argument in (argument for base in bases for argument in get_args(base)):
            kind = getattr(argument, "__bound__", argument)  # of a type variable
            if isinstance(kind, type) and issubclass(kind, State):
                cls.state_class = kind

    def _renew(self, observers: Sequence[Observer], spent: PrivacyLedger | None = None) -> None:
        """Create the objects for a new run; `spent` records the privacy budget of the strategy's earlier runs."""
        self.run = self._new_run(state=self.state_class(run=uuid.uuid4().hex), privacy=spent)
        self.federation = Federation(self.run)
        self.aggregator = Aggregator(self.run, self.federation)
        self.reporter = Reporter(self.run, self.size_of, observers)
        self.federation.answered = self.reporter.answered
        hooks = self.common, self.admit, self.first_arrays
        self.admission = Handshake(self.run, self.federation, *hooks, copies=self.copies)
        self.fresh = True

    @property
    def config(self) -> Config:
        """The complete configuration of the run."""
        return self.run.config

    @property
    def options(self) -> P:
        """The values of configuration keys that only this method has, such as `fedprox.mu`, in its class `Options`."""
        return cast(P, self.run.config.options)

    @property
    def traits(self) -> Traits:
        """The properties of the method that depend on its configuration, such as the arrays that clients share."""
        return self.run.traits

    @property
    def state(self) -> S:
        """The method's state, which is kept from round to round and saved in checkpoints."""
        return cast(S, self.run.state)

    @state.setter
    def state(self, state: S) -> None:
        self.run.state = state
        self.fresh = True

    def common(self, reply: Reply) -> Mapping[str, Common]:
        """Return values in a handshake reply that must be the same for all clients, by name for error messages.

        The most frequent value in the first handshake is used; clients with another value are refused.
        """
        return {}

    def admit(self, reply: Reply) -> None:
        """Store values of a client's first handshake reply in `state`; raise an exception to refuse the client."""

    def first_arrays(self, missing: Spec) -> Arrays | None:
        """Return initial values of arrays (`missing`: names, shapes, dtypes), or None to take them from clients."""
        return None

    def first_model(self, reply: Reply) -> Arrays:
        """Return the initial weights in a client's reply; raise a WireError if they are invalid."""
        return reply.arrays.get("model", {})

    def number_of_rounds(self) -> int:
        """Return the number of rounds; called after clients are admitted, also in a resumed run."""
        return self.config.rounds

    def participants(self, round: int) -> Sequence[str]:
        """Return the clients that take part in a round, by default a seeded sample of all clients admitted so far."""
        clients = in_order(self.state.clients)
        least = max(1, self.run.flower_options.min_train_nodes)
        count = max(least, math.floor(self.config.fraction_train * len(clients) + 0.5))
        drawn = numpy_generator(self.config.seed, "participation", round).permutation(len(clients))[:count]
        return [clients[index] for index in sorted(drawn)]

    def payload_for(self, client: str) -> Payload:
        """Return the payload for a client's training or evaluation, by default the shared arrays of its network."""
        model = self.aggregator.part_of(client)
        return Payload({"model": model} if model else {})

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        """Return the payloads for training in a round (from 1), by client; by default `payload_for(client)`."""
        return {client: self.payload_for(client) for client in clients}

    def evaluation_payloads(self, clients: Sequence[str], *, amid_training: bool) -> dict[str, Payload]:
        """Return the payloads for clients that only evaluate, by client; by default `payload_for(client)`.

        `amid_training` says whether other clients train in the same round.
        """
        return {client: self.payload_for(client) for client in clients}

    def check_reply(self, reply: Reply) -> None:
        """Check a reply after training; raise a WireError if `aggregate_fit` cannot use it.

        By default, a reply must have the shared model. It was already checked that all arrays are finite, and that the
        model's arrays have the right names and shapes. An exception in `aggregate_fit` ends the run.
        """
        if self.federation.specs[reply.client] and "model" not in reply.arrays:
            raise WireError("the client's reply has no model: check the client's mods and its own train function")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Update `state` from the valid replies of a round, in order of client name; return metrics for the history.

        By default, average the shared arrays, weighted by numbers of examples.
        """
        models = {client: reply.arrays["model"] for client, reply in replies.items() if "model" in reply.arrays}
        if models and self.traits.shares.averaged:
            self.state.model = self.state.model | self.aggregator.average(models, self.aggregator.weights(replies))
        return {}

    def size_of(self, client: str) -> str:
        """Return the size of a client's network in words, such as "width 0.5", for the history; by default empty."""
        return ""

    @property
    def makes_global_model(self) -> bool:
        """Whether the run creates a global model; by default, if clients share networks or the server trains one."""
        return self.traits.whole or self.state.serves

    @property
    def has_global_model(self) -> bool:
        """Whether there is a global model yet."""
        return self.makes_global_model and bool(self.state.model)

    def global_arrays(self) -> Arrays:
        """Return the arrays that `evaluate_fn` and the result of a run receive; by default the shared arrays."""
        return self.state.model

    def global_model(self) -> nn.Module | None:
        """Return the global model; None if there is none, or if clients do not share BatchNorm's statistics."""
        if not self.has_global_model:
            return None
        model = self.run.network_like(in_order(self.state.clients)[0], adapted=True)
        if model.state_dict().keys() - self.state.model.keys():
            return None
        load_into(model.state_dict(), self.state.model)
        return model

    def run_round(self, round: int) -> MetricRecord:
        """Run round `round` (from 1) or, after the last, the closing round (key `closing-epochs`); return metrics."""
        run = self.run
        federation = self.federation
        run.round = Round(round, closing=round > run.training_rounds)
        model = self.state.model
        # 1. Admit clients that have connected since the last round.
        self.admit_clients()
        # 2. Choose the clients that train.
        with run.calling("participants"):
            wanted = [*self.state.clients] if run.round.closing else self.participants(round)
        clients = federation.choose(wanted)
        # 3. Let the method make their payloads.
        with run.calling("configure_fit"):
            payloads = self.configure_fit(round, clients)
        # 4. Send the messages, await the replies, and check them.
        messages = federation.training(payloads)
        others = [client for client in federation.nodes if client not in run.round.training]
        if others and run.evaluates_now:
            messages += federation.evaluation(self.payloads_to_evaluate(others, amid_training=not run.round.closing))
        replies = federation.exchange(messages, self.check)
        evaluated = self._evaluate_failed(replies)
        # 5. Let the method update its state.
        metrics = self.aggregate(replies)
        # 6. Record the round.
        run.round.training -= evaluated.keys()
        return self.reporter.record(replies | evaluated, metrics, received=model)

    def _evaluate_failed(self, replies: Mapping[str, Reply]) -> dict[str, Reply]:
        """Evaluate the received model at clients whose own train function failed; return their replies."""
        run = self.run
        federation = self.federation
        failed = [client for client in federation.nodes if client in run.round.training and client not in replies]
        failed = [client for client in failed if run.evaluates_now and federation.known[client].report.wrapped]
        if not failed:
            return {}
        return federation.exchange(federation.evaluation(self.payloads_to_evaluate(failed, amid_training=True)))

    def admit_clients(self) -> None:
        """Admit clients that have connected, and complete what depends on them: shared arrays, number of rounds."""
        if self.admission.admit():
            self._prepare()

    def payloads_to_evaluate(self, clients: Sequence[str], *, amid_training: bool = False) -> dict[str, Payload]:
        """Call `evaluation_payloads` for clients that only evaluate.

        A client of which each training failed has no network of the method, only its initial one, and is not scored. An
        app with functions of its own is, as in Flower.
        """
        known, records = self.federation.known, self.state.clients
        clients = [client for client in clients if not records[client].failed or known[client].report.wrapped]
        with self.run.calling("evaluation_payloads"):
            return self.evaluation_payloads(clients, amid_training=amid_training)

    def check(self, reply: Reply) -> None:
        """Check a client's reply by `check_reply`, if it trained."""
        if reply.client in self.run.round.training:
            self.check_reply(reply)

    def aggregate(self, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Call `aggregate_fit` with the replies of trained clients; return its metrics, or {} for too few replies."""
        run = self.run
        round = run.round
        metrics: dict[str, float] = {}
        trained = {client: reply for client, reply in replies.items() if client in round.training}
        for client in round.training - trained.keys():
            self.state.clients[client].failed = self.state.clients[client].trained < 0
        if trained and len(trained) >= min(self.config.min_clients, len(round.training)):
            before = self.state.model
            with run.calling("aggregate_fit"):
                metrics = _numbers(self.aggregate_fit(round.number, trained))
                changed = self.state.model is not before
                self.state.model = as_declared(self.state.model, self.federation.specs.values())
            if run.privacy and changed:
                run.privacy.spend(trained, before, self.state.model)
            for client, reply in trained.items():
                self.state.clients[client].trained = round.number
                self.state.clients[client].examples = reply.examples
                self.state.clients[client].lost = False
                self.state.clients[client].failed = False
        elif round.training:
            log.warning("round %d is not aggregated: too few valid replies (%d), see below", round.number, len(trained))
            if round.number == 1 and not trained:
                raise FedhetError(f"no client gave a valid reply in the first round; correct this:\n{round.reasons()}")
        self.state.round = round.number
        return metrics

    def restart(self) -> None:
        """Begin a new run; if `state` was assigned since the last run, training continues from it instead."""
        self._flower.interrupted()
        if not self.fresh:
            self._renew(self.reporter.observers, self.run.privacy)

    def handshake(self, grid: Grid) -> None:
        """Wait for clients and admit those that can take part; raise a FedhetError if there are too few."""
        first = not self.state.clients
        self.admission.begin(grid)
        if self.reporter.directory and self.run.train_config:
            self.reporter.directory.reconfigure(self.config)
        self._prepare()
        self.run.open_ledger(mean=self.aggregator.plain)
        if first and not self.run.only_describes:
            self.reporter.record({}, {})

    def _prepare(self) -> None:
        """Complete what depends on the admitted clients: initial values of shared arrays, and the number of rounds."""
        run = self.run
        if run.config.start_from and not (run.state.round or run.initial or self.federation.simulated):
            # A node has its own model of an earlier run, and the server the global one.
            run.initial = global_model_in(run.config.start_from) if run.traits.whole else {}
        take_initial_arrays(self.run, self.federation)
        request_missing_arrays(self.run, self.federation, self.first_model)
        rounds = self.number_of_rounds()
        if rounds != self.config.rounds:
            self.run.override({"rounds": rounds})

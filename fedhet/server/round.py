"""The methods that a strategy overrides, with their defaults, and the round that calls them."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast, get_args

from torch import nn

from fedhet.data import PublicDataset
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower import Message, MessageType, MetricRecord
from fedhet.messages import Arrays, Payload, Reply, Spec, WireError, as_declared, by_position, load_into
from fedhet.messages.protocol import FIRST
from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Config, Options
from fedhet.results.state import State
from fedhet.server.aggregation import Aggregator, average_shared, distances
from fedhet.server.federation import Federation
from fedhet.server.reporter import Reporter
from fedhet.server.run import Round, Run
from fedhet.utils.randomness import numpy_generator, seeded
from fedhet.utils.statistics import in_order
from fedhet.utils.text import log

P = TypeVar("P", bound=Options)
S = TypeVar("S", bound=State)


class Common(NamedTuple):
    """A value that must be equal for all clients of a run; `remedy` is advice for a client with another value."""

    value: int | str
    remedy: str


class Hooks(Generic[P, S]):
    """Base class of strategies with the functions that a subclass overrides; the defaults implement FedAvg.

    Attributes:
        role: "server", which distinguishes strategies from client classes.
        method: the declaration of the method: its name, its configuration keys, and what it needs and exchanges.
        state_class: class of `state`; by default the one in brackets, as in `FederatedStrategy[MyOptions, MyState]`.
        copies: number of copies of each client's network that the server has in memory.
        fresh: whether no run has used `state` yet, so that the next run starts from it.
        run: the configuration, the state and the current `Round`, in which failures and bytes are counted.
        federation, aggregator, reporter: the run's clients, the aggregation of arrays, and the reports to observers.
    """

    role: ClassVar[str] = "server"
    method: Method
    state_class: ClassVar[type[State]] = State
    copies: ClassVar[int] = 0
    fresh: bool
    run: Run
    federation: Federation
    aggregator: Aggregator
    reporter: Reporter
    _admit_clients: Callable[..., None]  # `Handshake.admit`

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        named = vars(cls).get("__orig_bases__", ()) if "state_class" not in vars(cls) else ()
        for argument in (argument for base in named for argument in get_args(base)):
            kind = getattr(argument, "__bound__", argument)  # of a type variable
            if isinstance(kind, type) and issubclass(kind, State):
                cls.state_class = kind

    def run_round(self, round: int) -> MetricRecord:
        """Run round `round` (from 1) or, after the last, the closing round (key `closing-epochs`); return metrics."""
        run, federation = self.run, self.federation
        payloads = self._open(Round(round, closing=round > run.training_rounds))
        evaluate = run.round.closing or run.evaluates(round)
        epochs = self.config.closing_epochs if run.round.closing else self.config.local_epochs
        messages = federation.messages(MessageType.TRAIN, payloads, epochs=epochs, evaluate=evaluate)
        if evaluate:
            others = [client for client in federation.nodes if client not in payloads]
            messages += self._evaluation(others, amid_training=not run.round.closing)
        replies = federation.exchange(messages, self._check)
        failed = [client for client in federation.nodes if client in run.round.training and client not in replies]
        failed = [client for client in failed if evaluate and federation.known[client].report.wrapped]
        # A user's train function that fails does not take the client out of the evaluation of the received model.
        evaluated = federation.exchange(self._evaluation(failed, amid_training=True)) if failed else {}
        metrics = self._aggregate(replies)
        run.round.training -= evaluated.keys()
        replies |= evaluated
        return self.reporter.record({client: replies[client] for client in in_order(replies)}, metrics)

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
        self.run.state, self.fresh = state, True

    def public_dataset(self) -> PublicDataset | None:
        """Return the public dataset to send in the handshake; None if clients have one already or need none."""
        return self.run.public

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
        known = in_order(self.state.clients)
        least = max(1, self.run.flower_options.min_train_nodes)
        count = max(least, math.floor(self.config.fraction_train * len(known) + 0.5))
        drawn = numpy_generator(self.config.seed, "participation", round).permutation(len(known))[:count]
        return [known[index] for index in sorted(drawn)]

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
        model = self.run.network_like(in_order(self.state.clients)[0])
        if model.state_dict().keys() - self.state.model.keys():
            return None
        load_into(model.state_dict(), self.state.model)
        return model

    def _prepare(self) -> None:
        self._initialise()
        if (rounds := self.number_of_rounds()) != self.config.rounds:
            self.run.override({"rounds": rounds})

    def _initialise(self) -> None:
        """Set the shared arrays to `initial_arrays`; with `shared-init`, request the missing ones from clients."""
        run, state, specs = self.run, self.state, self.federation.specs
        if not run.traits.shares.averaged:
            return
        shared = dict.fromkeys(key for client in self.federation.nodes for key in specs[client])
        run.initial = by_position(run.initial, shared)
        unknown = sorted(run.initial.keys() - shared.keys())
        named_alike = run.traits.networks != "any"  # else methods may share arrays under names of their own
        if named_alike and unknown and len(unknown) == len(run.initial):
            raise ConfigError(
                f"initial_arrays has none of the arrays that clients share ({', '.join([*shared][:3])}, ...), but has "
                f"{', '.join(unknown[:3])}: pass ArrayRecord(model.state_dict()) of the clients' model"
            )
        if unknown and not state.round:
            log.warning("initial arrays that no client shares are ignored: %s", ", ".join(unknown[:3]))
        if run.initial:
            state.model = state.model | {key: array for key, array in run.initial.items() if key in shared}
            run.initial = {}
        if shared.keys() - state.model.keys() and run.traits.common_init and run.config.shared_init:
            self._fetch_first_arrays()

    def _fetch_first_arrays(self) -> None:
        """Request the initial weights that the shared model lacks from two clients, and from a third if they disagree.

        The weights of the client that is most similar to another are used. With a robust aggregation rule, all
        clients are asked, and Krum selects one.
        """
        state, specs, sent = self.state, self.federation.specs, dict[str, Arrays]()
        missing = {client: specs[client].keys() - state.model.keys() for client in self.federation.nodes}

        def keep(reply: Reply) -> None:
            sent[reply.client] = self.first_model(reply)

        def lacking(senders: float) -> Iterator[str]:
            having = Counter(key for arrays in sent.values() for key in arrays)
            for client in in_order(missing.keys() & self.federation.nodes.keys()):
                if any(having[key] < senders for key in missing[client]):
                    having.update(missing.pop(client))
                    yield client

        def ask(senders: float) -> None:
            while asked := [*lacking(senders)]:
                self.federation.ask(FIRST, dict.fromkeys(asked, Payload()), keep)

        model: Arrays = {}
        if self.config.aggregation == "mean":
            ask(2)
            if any((far := distances(sent)).values()):
                ask(3)
                far = distances(sent)
            for client in sorted(sent, key=far.__getitem__):
                model = sent[client] | model
        else:
            ask(math.inf)
            model = average_shared(sent, dict.fromkeys(sent, 1.0), "krum", self.config.byzantine)
        state.model = as_declared(model, specs.values()) | state.model
        if not state.model:
            raise FedhetError(f"no client sent its initial weights; remove the causes:\n{self.run.round.reasons()}")

    def _open(self, round: Round) -> dict[str, Payload]:
        """Begin a round: admit new clients, and return the payloads for the clients that train."""
        self.run.round = round
        self._admit_clients()
        self._prepare()
        chosen = self.federation.choose(self.state.clients if round.closing else self.participants(round.number))
        payloads = self._payloads("configure_fit", round.number, chosen)
        round.training = frozenset(payloads)
        return payloads

    def _payloads(self, hook: str, *arguments: Any, **keywords: Any) -> dict[str, Payload]:
        with self._calling(hook):
            payloads = getattr(self, hook)(*arguments, **keywords)
        return {client: payload for client, payload in payloads.items() if client in self.federation.nodes}

    def _evaluation(self, clients: Sequence[str], *, amid_training: bool = False) -> list[Message]:
        payloads = self._payloads("evaluation_payloads", clients, amid_training=amid_training)
        return self.federation.messages(MessageType.EVALUATE, payloads, evaluate=True)

    def _check(self, reply: Reply) -> None:
        if reply.client in self.run.round.training:
            self.check_reply(reply)

    def _aggregate(self, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Call `aggregate_fit` with the replies of trained clients; return its metrics, or {} for too few replies."""
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
                self.state.clients[client].examples = trained[client].examples
        elif round.training:
            log.warning("round %d is not aggregated: too few valid replies (%d), see below", round.number, len(trained))
            if round.number == 1 and not trained:
                raise FedhetError(f"no client gave a valid reply in the first round; correct this:\n{round.reasons()}")
        self.state.round = round.number
        return metrics

    @contextmanager
    def _calling(self, hook: str) -> Iterator[None]:
        """Context manager around a call of the method's function `hook`, which converts exceptions to a FedhetError."""
        try:
            with seeded(self.config.seed, hook, self.run.round.number):  # own methods may draw random numbers
                yield
        except FedhetError:
            raise
        except Exception as error:
            number = self.run.round.number
            raise FedhetError(
                f"round {number}: {hook} of {self.run.method.name} failed ({type(error).__name__}: {error}); fix the "
                f"cause and resume the run, which continues after round {number - 1}"
            ) from error

"""What a method's server half is: the contract. Everything else of a run is the base strategy's."""

import uuid
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch import Tensor, nn

from fedhet import config as configuration
from fedhet import given, population, registry
from fedhet.data import Pool
from fedhet.data.own import as_input, as_pool
from fedhet.errors import ConfigError
from fedhet.flower import settings as flower_settings
from fedhet.method import Method, Traits
from fedhet.options import Config, Parameters, Value, kebab
from fedhet.server.networks import check_like, network_like
from fedhet.server.robust import Rule, cut_to_bound, put_together
from fedhet.server.roster import Roster
from fedhet.server.round import Round, draw, in_order
from fedhet.sharing import NOTHING
from fedhet.state import State
from fedhet.wire import Arrays, Payload, Reply, Spec, WireError, load_into, without_widths
from fedhet.wire import cast as cast_arrays

P = TypeVar("P", bound=Parameters)
S = TypeVar("S", bound=State)


class ServerHalf(Generic[P, S]):
    """What a method does at the server. Subclasses override what they need; the defaults average what is shared.

    Attributes:
        method: the method as a value; a subclass names it, and so can be made by keyword.
        state_class: the method's own state, a `State` with fields of its own.
        config: the run's complete configuration; `parameters` are the method's own keys in it.
        traits: the method's answers to the contract's six questions.
        state: all that outlives a round.
        shared: the pool that the server gives to clients, as the method needs it; None if there is none here.
        metric: name of the task's metric, the same for all clients.
        own_data: whether clients have data that are not the configured data set's.
        outputs: how many outputs a prediction has, where clients say so; the most, if they differ.
        devices: where the clients compute, in words, each once.
    """

    role: ClassVar[str] = "server"
    method: Method
    state_class: ClassVar[type[State]] = State
    takes_in: bool = False
    """Whether replies are large and taken in one by one (`take_in`), so that they are never all held at once."""

    def __init__(
        self,
        config: Config | None = None,
        *,
        shared: Pool | Tensor | None = None,
        model: Any = None,
        **settings: Value,
    ) -> None:
        self.config = config or configuration.resolve(self._keys(settings))
        self.method = registry.method(self.config.prefix)
        self.shared, self.model = population.pool_for(self.config, as_pool(shared)), given.model_function(model)
        run = "" if self.config.state_dir else uuid.uuid4().hex[:12]
        self.state = cast(S, self.state_class(run=run))
        self.roster = Roster()
        self._round = Round()
        self.metric, self.own_data, self.outputs = "accuracy", False, 0
        self.devices: list[str] = []
        self._answered: tuple[Parameters, Traits] | None = None  # asked for every client of every round
        self._handed: tuple[Arrays, dict[tuple[str, ...], Arrays]] = ({}, {})

    @classmethod
    def _keys(cls, settings: Mapping[str, Value]) -> dict[str, Value]:
        if not hasattr(cls, "method"):
            raise ConfigError(
                f"{cls.__name__} says not whose half it is: set its class attribute `method` to the Method"
            )
        own = {kebab(f.name) for f in fields(cls.method.Parameters)}
        keys = flower_settings.translated(settings)
        return {"method": cls.method.name} | {
            f"{cls.method.family}.{key}" if key in own else key: value for key, value in keys.items()
        }

    # ---- what a method knows

    @property
    def name(self) -> str:
        """The method's name."""
        return self.method.name

    @property
    def parameters(self) -> P:
        """The method's own keys."""
        found: P = self.config.parameters
        return found

    @property
    def traits(self) -> Traits:
        """The answers to the six questions, for these parameters."""
        if self._answered is None or self._answered[0] is not self.config.parameters:
            self._answered = self.config.parameters, self.method.traits_of(self.config.parameters)
        return self._answered[1]

    @property
    def rule(self) -> Rule:
        """How what clients send is put together."""
        return Rule.of(self.config)

    @property
    def shares(self) -> bool:
        """Whether clients learn anything of each other."""
        return self.traits.shares.keys is not NOTHING.keys or type(self).aggregate_fit is not ServerHalf.aggregate_fit

    @property
    def training_rounds(self) -> int:
        """The rounds of training: as configured, or as there were when early stopping ended it."""
        return self.state.stopped or self.config.rounds

    @property
    def last_round(self) -> int:
        """The last round of all: the closing one, if there is one."""
        return self.training_rounds + bool(self.config.closing_epochs)

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Names, shapes and dtypes of what each client shares of its network."""
        return self.roster.specs

    @property
    def present(self) -> list[str]:
        """The clients that are there, in order of name."""
        return list(self.roster.nodes)

    @property
    def closing(self) -> bool:
        """Whether the round under way is the closing round, after the last of the configured ones."""
        return self._round.closing

    @property
    def failed(self) -> list[str]:
        """The clients, and nodes without a name, that did not do what they were asked in the round under way."""
        return [failure["client"] for failure in self._round.failures]

    def in_order(self, clients: Iterable[str]) -> list[str]:
        """Clients in order of name, "2" before "10"."""
        return in_order(clients)

    # ---- before the first round

    def public_dataset(self) -> Pool | None:
        """The pool that clients are sent when they are greeted; by default the one that the server was given."""
        return self.shared

    def compatibility(self, reply: Reply) -> Hashable:
        """Return what all clients must have in common, of the answer to a greeting.

        Of clients that come together the most frequent kind is admitted first (`most_alike_first`).
        """
        spec: Spec | None = reply.report.spec if self.traits.networks != "any" else None
        if spec is not None and self.traits.networks == "widths":
            spec = without_widths(spec)
        own_pool = self.traits.pool != "none" and self.public_dataset() is None  # that each brings along
        pool = (reply.report.pool, reply.report.pool_size) if own_pool else None
        return reply.report.metric, reply.report.labels, None if spec is None else tuple(spec.items()), pool

    def admit(self, reply: Reply) -> None:
        """Take in what a client answered to its first greeting; of its arrays it is only known that they are finite.

        What it raises refuses the client.

        Raises:
            FedhetError: why this client cannot take part.
        """

    def first_arrays(self, missing: Spec) -> Arrays | None:
        """First values of shared keys that clients have and nobody gave yet, where the server makes them.

        Args:
            missing: shapes and dtypes of these keys.

        Returns:
            A value for each; None where clients give their own initial weights.
        """
        return None

    def number_of_rounds(self) -> int:
        """How many rounds the run needs; asked once the clients are there, also in a resumed run."""
        return self.config.rounds

    # ---- a round

    def participants(self, round: int) -> Sequence[str]:
        """Who takes part in a round, there or not; by default drawn from the seed among all that were ever here."""
        return draw(self.config.seed, round, self.state.clients, self.config.fraction_train)

    def payload_for(self, client: str) -> Payload:
        """What a client receives, to train on or to be evaluated with; by default its part of what is shared."""
        model = self.shared_with(client)
        return Payload({"model": model} if model else {})

    def shared_with(self, client: str) -> Arrays:
        """A client's part of what is shared, as it travels; the same object for clients that have the same keys."""
        if self._handed[0] is not self.state.model:
            self._handed = (self.state.model, {})
        keys, handed = tuple(self.specs.get(client, ())), self._handed[1]
        if keys not in handed:
            model = self.state.model
            # The global model of a method that matches has other shapes than any client's, and the same names.
            own = model if self.traits.whole else {key: model[key] for key in keys if key in model}
            handed[keys] = cast_arrays(own, self.config.wire_dtype)
        return handed[keys]

    def evaluation_payloads(self, clients: Sequence[str], *, amid_training: bool) -> dict[str, Payload]:
        """What each of these clients receives only to be evaluated.

        Args:
            clients: in order of name.
            amid_training: whether it is beside a round in which others train.
        """
        return {client: self.payload_for(client) for client in clients}

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        """What each chosen client receives in this round.

        Not the method of this name in Flower's older API: it maps client names to payloads.

        Args:
            round: from 1.
            clients: the chosen clients that are there, in order of name.
        """
        return {client: self.payload_for(client) for client in clients}

    def check_reply(self, reply: Reply) -> None:
        """Check what a method's own groups of arrays hold, after training or in an answer to `ask`.

        That all arrays are finite, and the names and shapes of the model's, are checked already. By default the model
        must be there, if it travels.

        Raises:
            WireError: what is wrong with them.
        """
        if self.specs[reply.client] and "model" not in reply.arrays:
            raise WireError("its model is missing")

    def take_in(self, round: int, reply: Reply) -> None:
        """Take what is large out of a valid reply, which `aggregate_fit` sees without it.

        Called with `takes_in`, in order of client name, as replies come. A round that does not count in the end is
        followed by another `configure_fit`.
        """

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Learn from the valid replies of a round; returns metrics for the history.

        Not the method of this name in Flower's older API: it maps client names to replies, in order of name, and
        changes `state`. By default what is shared is averaged by numbers of examples.
        """
        models = {client: reply.arrays["model"] for client, reply in replies.items() if "model" in reply.arrays}
        if models and self.traits.shares.averaged:
            weights = {client: float(replies[client].examples) for client in models}
            self.state.model = self.state.model | self.average(models, weights, self.specs)
        return {}

    def average(
        self,
        models: Mapping[str, Arrays],
        weights: Mapping[str, float],
        specs: Mapping[str, Spec],
        before: Arrays | None = None,
    ) -> Arrays:
        """One array of each shared key, by the key `aggregation`; updates that are cut are named in the round's row.

        Args as of `put_together`; `before` is `state.model` if left out.
        """
        start = self.state.model if before is None else before
        found, cuts = put_together(models, weights, specs, start, self.rule)
        self._round.name_cuts(map(vars, cuts))
        return found

    def average_told(self, told: Mapping[str, Arrays]) -> Arrays:
        """One array of each name, by the key `aggregation`, of float arrays that are none of a network.

        Args:
            told: by client, in order of name; all count the same, and a name counts for those who have it.
        """
        specs = {c: {name: (array.shape, "float32") for name, array in own.items()} for c, own in told.items()}
        return self.average(told, dict.fromkeys(told, 1.0), specs, before={})

    def bounded(self, told: Mapping[str, Arrays]) -> Mapping[str, Arrays]:
        """What clients told, cut to `clip-norm` median norms, for methods that make of it what is no average."""
        bound = self.rule.bound
        made, cuts = cut_to_bound(told, {}, bound) if bound and told else (told, [])
        self._round.name_cuts(map(vars, cuts))
        return made

    # ---- the end

    def take_last(self, reply: Reply) -> None:
        """Check what a client sent back at the evaluation at the end, and take it in.

        Raises:
            WireError: what is wrong with it.
        """

    def global_model(self) -> nn.Module | None:
        """The global model, where the server knows the architecture and statistics do not stay with the clients."""
        if not self.has_global_model:
            return None
        model = self.network_of(self.in_order(self.state.clients)[0])
        if model.state_dict().keys() - self.state.model.keys():
            return None
        load_into(model.state_dict(), self.state.model)
        return model

    @property
    def has_global_model(self) -> bool:
        """Whether there is a `global_model` (by now)."""
        return self.traits.whole and bool(self.state.model)

    def network_of(self, client: str) -> nn.Module:
        """A network of a client's architecture, for methods that hold client models at the server.

        Raises:
            FedhetError: the client says neither which architecture it has nor which partition.
        """
        record = self.state.clients[client]
        place = record.architecture, record.partition
        return network_like(client, *place, self.config, self.model, self._way_out)

    def check_network(self, reply: Reply) -> None:
        """Find out in the greeting whether `network_of` will give this client's network, all of which is shared.

        Raises:
            FedhetError: it will not, and the way out.
        """
        check_like(reply.report, self.config, self.model, self._way_out)

    @property
    def _way_out(self) -> str:
        return f"give it the clients' models, make_server_app(model=...) or {type(self).__name__}(model=...)"

    def transform(self, inputs: Tensor) -> Tensor:
        """A model's batch of raw inputs of the shared pool, at the server."""
        own = self.model or self.own_data
        return as_input(inputs) if own else population.dataset_of(self.config).transform(inputs)

    def matrices(self) -> dict[str, Any]:
        """Named matrices for the report, as JSON values, which the method's `drawings` draw."""
        return {}

"""The declaration of a method: its name, its keys and its traits, with the names of its server and client classes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedhet.errors import ConfigError
from fedhet.methods import options
from fedhet.methods.options import AGGREGATIONS, Value
from fedhet.methods.sharing import NOTHING, Sharing

METRICS, STRUCTURE = "metrics", "structure"
"""Kinds of values that every client may send: metrics, which a node may withhold, and facts about its network, such as
widths, which are always sent."""


ABSENT = "clients took no part"
"""Words of the warning about clients that took part in no round."""

UNSCORED = (
    "{}'s model is at the server only and was not evaluated; the clients' scores are those of local training: set "
    "test-on = both (with your own data, return a common test set as `common`), or pass an evaluate_fn to "
    "make_server_app"
)
"""The warning about a method whose model is at the server only and cannot be evaluated there."""


@dataclass(frozen=True)
class Traits:
    """The properties of a method that the server and the clients need to know.

    Attributes:
        networks: how networks may differ: not at all (`"equal"`), in their `"widths"`, or in any way (`"any"`).
        shares: which arrays of a client's network are shared, and how.
        keeps: what a client keeps between rounds: its whole `"model"`, the unshared `"rest"` of it, or `"nothing"`.
        scored: which network is evaluated for the method's results: the one that clients `"received"`, or the one that
            they `"trained"`, which requires `keeps="model"`.
        common_init: clients start from equal weights if `shared-init` is set.
        public: what the method needs of the public dataset: `"none"`, `"inputs"`, or inputs and labels (`"labelled"`).
        public_at_server: the server needs the inputs of the public dataset as well.
        communicates: clients exchange arrays or values with the server; False for local training.
        serves_clients: clients use what the server computes; False if the result is a model at the server only, which
            is evaluated on the common test set.
        other_arrays: how the server aggregates arrays other than weights: by their `"mean"`; by an average of
            `"entries"`, to which the key `aggregation` applies; by another function of `"whole"` arrays, whose norm
            `clip-norm` can limit; or `""` if there are none or neither key applies.
        sends: the kind (`fedhet.client.policy.KINDS`, or `STRUCTURE`) of each group of arrays and of each value that a
            client sends. Shared arrays are the group `model`, by default of kind `weights`.
        sums_examples: clients send means over examples, or numbers of examples, in a kind other than `statistics` and
            `prototypes`; differentially private training (`dp-noise`) does not cover these.
        planned: a round depends on the total number of rounds.
    """

    networks: Literal["equal", "widths", "any"] = "any"
    shares: Sharing = NOTHING
    keeps: Literal["model", "rest", "nothing"] = "rest"
    scored: Literal["received", "trained"] = "received"
    common_init: bool = False
    public: Literal["none", "inputs", "labelled"] = "none"
    public_at_server: bool = False
    communicates: bool = True
    serves_clients: bool = True
    other_arrays: Literal["", "mean", "entries", "whole"] = ""
    sends: Mapping[str, str] = field(default_factory=dict, hash=False)
    sums_examples: bool = False
    planned: bool = False

    def __post_init__(self) -> None:
        if self.scored == "trained" and self.keeps != "model":
            raise ConfigError('Traits(scored="trained") also needs keeps="model", so that clients keep the network')

    @property
    def kinds(self) -> frozenset[str]:
        """Return the kinds (`fedhet.client.policy.KINDS`) of the arrays and values that clients send."""
        weights = {"weights"} if self.shares.keys != "nothing" and "model" not in self.sends else set()
        return frozenset({*self.sends.values()} | weights)

    @property
    def exchanges_weights(self) -> bool:
        """Return whether clients send weights of networks, or receive generated weights."""
        return not self.kinds.isdisjoint({"weights", "hypernetwork"})

    @property
    def averages_model(self) -> bool:
        """Return whether clients share arrays of their networks, which the server averages."""
        return self.shares.averaged and self.shares.keys != "nothing"

    @property
    def averages(self) -> bool:
        """Return whether the server averages arrays entry by entry, so that the key `aggregation` has an effect."""
        return (
            (self.averages_model and self.networks != "widths")
            or "model" in self.sends
            or self.other_arrays == "entries"
        )

    @property
    def alike(self) -> Literal["equal", "widths", "parts", "any"]:
        """How shared arrays may differ: the value of `networks`, or `"parts"` if clients have parts of one network."""
        return "parts" if self.shares.units else self.networks

    @property
    def bounded(self) -> bool:
        """Return whether the key `clip-norm` can limit the norm of the arrays that a client sends."""
        return self.averages or self.other_arrays == "whole"

    @property
    def aggregations(self) -> tuple[str, ...]:
        """Return the values of the key `aggregation` that the method supports."""
        return AGGREGATIONS if self.averages else ("mean", "norm-clipped") if self.bounded else ("mean",)

    @property
    def whole(self) -> bool:
        """Return whether all clients share one network, the global model."""
        return self.networks != "any" and self.shares.averaged and self.shares.keys == "everything"

    @property
    def starts_unseen_clients(self) -> bool:
        """Return whether a client that joins after the last round receives weights, or clients train locally anyway."""
        return not self.communicates or self.scored == "received" or self.averages_model


@dataclass(frozen=True)
class Method:
    """The declaration of a method.

    Attributes:
        name: the name in configurations, and the prefix of its own keys.
        traits: the traits, or a function that returns them for the method's own keys.
        Options: frozen dataclass of the method's own keys, with the paper's values.
        server, client: `"package.module:Class"` of each side. By default the class with the method's name in
            `strategies/` or `client_apps/` or, without one, `fedhet.server.FederatedStrategy`, which averages shared
            arrays, and `fedhet.client.ClientSide`, which trains on the client's examples.
        common: the paper's values of common keys.
        own: values of keys for a user's own models and data, where they differ from all methods' (`OWN_SETTINGS`).
        trains: what clients train, such as a hypernetwork, if it is not their network. In a comparison such a method
            has its own optimizer and learning rate.
        family: the prefix of the method's keys: its name, or that of the method that it is a `variant` of.
    """

    name: str
    traits: Traits | Callable[[Any], Traits] = field(default_factory=Traits)
    Options: type[options.Options] = options.Options
    server: str = ""
    client: str = ""
    common: Mapping[str, Value] = field(default_factory=dict, hash=False)
    own: Mapping[str, Value] = field(default_factory=dict, hash=False)
    trains: str = ""
    family: str = ""

    def __post_init__(self) -> None:
        if not self.family:
            object.__setattr__(self, "family", self.name)

    def variant(self, name: str, **changes: Any) -> "Method":
        """Return a method with the same keys and some attributes changed; `server` and `client` can be classes."""
        for side in {"server", "client"} & changes.keys():
            if isinstance(each := changes[side], type):
                changes[side] = f"{each.__module__}:{each.__qualname__}"
        return replace(self, name=name, family=self.family, **changes)

    @property
    def settles_rounds(self) -> bool:
        """Return whether the method determines the number of rounds itself (`rounds = 0`)."""
        return self.common.get("rounds") == 0

    def traits_of(self, options: options.Options) -> Traits:
        """Return what the method needs and supports with these values of its own keys."""
        return self.traits(options) if callable(self.traits) else self.traits

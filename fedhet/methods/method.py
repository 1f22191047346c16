"""The declaration of a method: its name, its keys and its traits, with the names of its server and client classes."""

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, replace
from typing import Any, Literal, TypeVar, get_args

from fedhet.errors import ConfigError
from fedhet.methods import options
from fedhet.methods.options import Aggregation, Value
from fedhet.methods.sharing import BODY, HEAD, NOTHING, Sharing

T = TypeVar("T", bound=type[Any])

METRICS, STRUCTURE = "metrics", "structure"
"""Kinds of values that any method can make clients send: metrics, and facts about a network, such as widths."""

TEACHING = "public-training"
"""Kind of a method whose clients train on labelled public examples, which the server can choose."""

_ARRAYS = (
    "weights",
    "statistics",
    "features",
    "posteriors",
    "prototypes",
    "projections",
    "descriptors",
    "hypernetwork",
)
KINDS = (*_ARRAYS, TEACHING, METRICS)
"""Kinds of values that a node can send, and of training that it can do.

- `weights`: arrays of a network, or their changes.
- `statistics`: classes of the examples, numbers of examples by class, and BatchNorm's statistics.
- `features`: representations of public examples.
- `posteriors`: class scores of public examples, or mean class scores and numbers of examples by class.
- `prototypes`: mean representations and numbers of examples by class.
- `projections`: representations of single examples of the client (FedCA).
- `descriptors`: the most important activations of a network's blocks for public images (FedHARM).
- `hypernetwork`: parameters of a hypernetwork.
- `public-training`: nothing is sent, but the client trains on labelled public examples, which the server can choose.
- `metrics`: metrics and losses.

Numbers of examples and facts about a network (`STRUCTURE`), such as the width of its representation, are always sent.
"""

ABSENT = "clients took no part"
"""Text in the warning about clients that trained in no round, by which the warning is found in a log."""

UNSCORED = (
    "{}'s model is at the server only and was not evaluated; the clients' scores are those of local training: set "
    "test-on = both (with your own data, return a common test set as `common`), or pass an evaluate_fn to "
    "make_server_app"
)
"""Warning that the server has the only model and no test set to evaluate it; `{}` is for the method's name."""


@dataclass(frozen=True)
class Traits:
    """The properties of a method that the server and the clients need to know.

    Attributes:
        networks: how networks may differ: not at all (`"equal"`), in layers' `"widths"`, as `"parts"` of one network
            (see `Sharing.units`), or in any way (`"any"`).
        shares: which arrays of a client's network are shared, and how.
        keeps: what a client keeps between rounds: its whole `"model"`, the unshared `"rest"` of it, or `"nothing"`.
        common_init: clients start from equal weights if `shared-init` is set.
        public: what the method needs of the public dataset: `"none"`, `"inputs"`, or inputs and labels (`"labelled"`).
        serves_clients: clients use what the server computes; False if only the server has a model, and evaluates it.
        other_arrays: how the server aggregates arrays other than weights: by their `"mean"`; by an average of
            `"entries"`, to which the key `aggregation` applies; by another function of `"whole"` arrays, whose norm
            `clip-norm` can limit; or `""` if there are no such arrays or neither key applies to them.
        sends: the kind of each value and group of arrays that a client sends, by name: `STRUCTURE` (facts about a
            network) or a kind that a node may refuse to send (see `KINDS`). Shared arrays are the group `model`, by
            default of kind `weights`.
        predicts: by what a client predicts, as a noun phrase for reports.
        inside: what the method uses inside networks: the `"head"`, the `"representation"` with the head, or `""`.
    """

    networks: Literal["equal", "widths", "parts", "any"] = "any"
    shares: Sharing = NOTHING
    keeps: Literal["model", "rest", "nothing"] = "rest"
    common_init: bool = False
    public: Literal["none", "inputs", "labelled"] = "none"
    serves_clients: bool = True
    other_arrays: Literal["", "mean", "entries", "whole"] = ""
    sends: Mapping[str, str] = field(default_factory=dict, hash=False)
    predicts: str = "the client's network"
    inside: Literal["", "head", "representation"] = "representation"

    def __post_init__(self) -> None:
        if (self.networks == "parts") != (self.shares.units is not None):
            raise ConfigError('traits need networks = "parts" if, and only if, their sharing map has `units`: set both')

    @property
    def scored(self) -> Literal["received", "trained"]:
        """The network that is evaluated for results: the one that clients `trained`, if they keep it, or `received`."""
        return "trained" if self.keeps == "model" else "received"

    @property
    def uses_phi(self) -> bool:
        """Whether the method uses representations, to which the key `representation` applies."""
        return self.inside == "representation"

    @property
    def communicates(self) -> bool:
        """Whether clients send anything to the server; False for local training."""
        return bool(self.sends) or self.shares.keys != "nothing"

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of what clients send, such as `weights`, and `public-training` if they train so (see `KINDS`)."""
        weights = {"weights"} if self.shares.keys != "nothing" and "model" not in self.sends else set()
        teaching = {TEACHING} if self.public == "labelled" else set()
        return frozenset({*self.sends.values()} | weights | teaching)

    @property
    def exchanges_weights(self) -> bool:
        """Whether clients send weights of networks, or receive weights generated by a hypernetwork."""
        return not self.kinds.isdisjoint({"weights", "hypernetwork"})

    def compares(self, kind: str) -> bool:
        """Return whether what clients share depends on the order of the `classes` or `columns` of inputs (`kind`)."""
        if kind.startswith("columns"):
            return self.public != "none" or (self.exchanges_weights and self.shares is not HEAD)
        by_class = {"prototypes", "statistics"} | ({"posteriors"} if self.other_arrays else set())
        by_class |= {"weights", "hypernetwork"} if self.shares is not BODY else set()
        return self.public == "labelled" or not by_class.isdisjoint(self.kinds)

    @property
    def averages_model(self) -> bool:
        """Whether clients share arrays of their networks, which the server averages."""
        return self.shares.averaged and self.shares.keys != "nothing"

    @property
    def aggregations(self) -> tuple[str, ...]:
        """Values of the key `aggregation` that the method supports: all, if the server averages entry by entry."""
        averages = self.averages_model and self.networks != "widths"
        if averages or "model" in self.sends or self.other_arrays == "entries":
            return get_args(Aggregation)
        return ("mean", "norm-clipped") if self.other_arrays == "whole" else ("mean",)

    @property
    def bounded(self) -> bool:
        """Whether the key `clip-norm` can limit the norm of the arrays that a client sends."""
        return len(self.aggregations) > 1

    def models_of_clients(self, batch_norm: str) -> bool:
        """Return whether clients are scored by models of their own, or by parts of one, and not by the global model."""
        return not self.whole or self.networks == "parts" or batch_norm != "aggregate"

    @property
    def whole(self) -> bool:
        """Whether all clients share one network, the global model."""
        return self.networks != "any" and self.shares.averaged and self.shares.keys == "everything"


@dataclass(frozen=True)
class Method:
    """The declaration of a method.

    Attributes:
        name: the name in configurations, and the prefix of its own keys.
        traits: the method's properties, or a function that returns them for an instance of `Options`.
        Options: frozen dataclass of the keys that only this method has, with the paper's values.
        server: `"package.module:Class"` of the strategy, by default `fedhet.server.FederatedStrategy`, which averages
            shared arrays.
        client: `"package.module:Class"` of the client side, by default `fedhet.client.ClientSide`, which trains on the
            client's examples.
        common: the paper's values of keys that all methods have, such as `rounds`.
        own: values of keys for a user's own models and data, in place of those that fedhet uses for most methods.
        trains: what clients train instead of networks (a hypernetwork); comparisons keep its optimizer settings.
        variant_of: name of the method whose keys this one has, if `variant` made it.
    """

    name: str
    traits: Traits | Callable[[Any], Traits] = field(default_factory=Traits)
    Options: type[options.Options] = options.Options
    server: str = ""
    client: str = ""
    common: Mapping[str, Value] = field(default_factory=dict, hash=False)
    own: Mapping[str, Value] = field(default_factory=dict, hash=False)
    trains: str = ""
    variant_of: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w-]*", self.name) or self.name in options.fields_of(options.Config):
            raise ConfigError(
                f"method {self.name!r}: a method's name is the prefix of its keys and part of its runs' folders: use "
                "letters, digits, '-' and '_', and no name of a key"
            )
        for kind in self.Options.__mro__:
            if any(isinstance(value, Field) for value in vars(kind).values()):
                raise ConfigError(
                    f"method {self.name!r}: the class {kind.__qualname__} has options, but is no dataclass, so that "
                    "they are no keys: write @dataclass(frozen=True) over it"
                )

    @property
    def family(self) -> str:
        """The prefix of the method's keys: its name or, for a copy that `variant` made, the original's."""
        return self.variant_of or self.name

    def variant(self, name: str, **changes: Any) -> "Method":
        """Return a copy with a new name and new attributes; `server` and `client` may be classes or `module:Class`."""
        for side in {"server", "client"} & changes.keys():
            changes[side] = _reference(changes[side])
        return replace(self, name=name, variant_of=self.family, **changes)

    @property
    def settles_rounds(self) -> bool:
        """Whether the method determines the number of rounds itself (`rounds = 0`)."""
        return self.common.get("rounds") == 0

    def traits_of(self, options: options.Options) -> Traits:
        """Return the method's properties for the values in `options`, the keys that only this method has."""
        return self.traits(options) if callable(self.traits) else self.traits


def method(
    name: str,
    traits: Traits | Callable[[Any], Traits],
    Options: type[options.Options] = options.Options,
    *,
    client: str | type = "",
    common: Mapping[str, Value] | None = None,
    own: Mapping[str, Value] | None = None,
    trains: str = "",
) -> Callable[[T], T]:
    """Return a decorator of a strategy that declares its method, and sets the class's attribute `method` to it.

    The arguments are attributes of `Method`; `client` may also be a class.
    """

    def declare(strategy: T) -> T:
        server = _reference(strategy)
        strategy.method = Method(name, traits, Options, server, _reference(client), common or {}, own or {}, trains)
        return strategy

    return declare


def _reference(side: str | type) -> str:
    return side if isinstance(side, str) else f"{side.__module__}:{side.__qualname__}"

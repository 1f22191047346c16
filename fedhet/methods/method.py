"""A method as one value: its name, its keys, its traits, and its two sides by name; each machine imports its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedhet.errors import ConfigError
from fedhet.methods import options
from fedhet.methods.options import AGGREGATIONS, Value
from fedhet.methods.sharing import NOTHING, Sharing

METRICS, STRUCTURE = "metrics", "structure"
"""Kinds of what leaves a client beside those that make a method: metrics, which a node may keep to itself without being
of less use; and facts about its network, such as widths, which always leave."""


@dataclass(frozen=True)
class Drawing:
    """A picture of a method's report.

    Attributes:
        figure: `"package.module:function"`, from the matrices (JSON values) to a matplotlib Figure; imported late.
        caption: the words below it.
    """

    figure: str
    caption: str


ABSENT = "clients took no part"
"""Words of the warning that names the clients that were in no round of a run."""

UNSCORED = (
    "{}'s model is at the server alone and has no score, and the clients' scores are those of training alone: it needs "
    "a common test set and test-on = both (with data of your own, return it as `common`), or an evaluate_fn, as in "
    "make_server_app(evaluate_fn=...)"
)
"""The remark on a method that does not serve clients, by its name, where its model cannot be scored."""


@dataclass(frozen=True)
class Traits:
    """The properties of a method by which servers and clients treat it.

    Attributes:
        networks: which networks may differ: none (`"equal"`), those of one graph in their `"widths"`, or `"any"`.
        shares: what of a client's network is shared, and how.
        keeps: what a client keeps from round to round: its whole `"model"`, the `"rest"` that is not shared, or
            `"nothing"`.
        scored: which evaluation is the headline score: of what clients `"received"`, or of what they `"trained"`, which
            they must keep, since the evaluation at the end is of that.
        common_init: whether clients start from one initialisation, where `shared-init` says so, or each from its own.
        public: what is needed of the public dataset: `"none"`, `"inputs"`, or inputs and labels (`"labelled"`).
        public_at_server: whether the server, too, needs the inputs of the public dataset.
        communicates: whether clients exchange anything; False for training alone.
        serves_clients: whether clients have anything of what is made of theirs; False if it is a model of the server's
            alone, whose score on the common test set is the method's.
        other_arrays: how the server aggregates arrays other than weights: an average of `entries`, to which
            `aggregation` applies; something else of `whole` arrays, which can be cut to `clip-norm`; or neither.
        sends: what leaves the client: the kind (`fedhet.client.policy.KINDS`, or `STRUCTURE`) of each group of arrays
            and of each value; what is shared of a network goes as `model`, of kind weights unless it is given here.

    Raises:
        ConfigError: a method scored on what clients trained does not have them keep it.
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
    other_arrays: Literal["", "entries", "whole"] = ""
    sends: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Check that the traits fit each other."""
        if self.scored == "trained" and self.keeps != "model":
            raise ConfigError('a method scored on what clients "trained" must have them keep their "model"')

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of what leaves the client."""
        weights = {"weights"} if self.shares.keys != "nothing" and "model" not in self.sends else set()
        return frozenset({*self.sends.values()} | weights)

    @property
    def averages(self) -> bool:
        """Whether the server averages arrays entry by entry, so that `aggregation` has a meaning."""
        shared = self.shares.averaged and self.shares.keys != "nothing" and self.networks != "widths"
        return shared or "model" in self.sends or self.other_arrays == "entries"

    @property
    def alike(self) -> Literal["equal", "widths", "parts", "any"]:
        """How shared arrays may differ, with the values of `networks`, or `"parts"` if clients have parts."""
        return "parts" if self.shares.units else self.networks

    @property
    def bounded(self) -> bool:
        """Whether the arrays that a client sends can be clipped (`clip-norm`)."""
        return self.averages or self.other_arrays == "whole"

    @property
    def aggregations(self) -> tuple[str, ...]:
        """Values of `aggregation` that have a meaning."""
        return AGGREGATIONS if self.averages else ("mean", "norm-clipped") if self.bounded else ("mean",)

    @property
    def whole(self) -> bool:
        """Whether all clients share one whole network, the global model."""
        return self.networks != "any" and self.shares.averaged and self.shares.keys == "everything"

    @property
    def starts_unseen_clients(self) -> bool:
        """Whether an unseen client receives weights, or all clients train alone anyway."""
        return (
            not self.communicates
            or self.scored == "received"
            or (self.shares.averaged and self.shares.keys != "nothing")
        )


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        name: in configurations, and before its own keys.
        traits: its traits, or a function of the parameters that gives them.
        Parameters: frozen dataclass of its own keys, with the paper's values.
        server: `"package.module:Class"` of its server side, a `fedhet.server.FederatedStrategy`. By default the class
            of the method's name in `strategies/`, or else that class, which averages what is shared.
        client: `"package.module:Class"` of its client side, a `fedhet.client.ClientSide`. By default the class of the
            method's name in `client_apps/`, or else that class, which trains the network on the client's examples.
        common: the paper's values of keys that all methods share.
        own: values of keys, for networks and data of a user's own, that differ from `fedhet.config.OWN_SETTINGS`.
        drawings: pictures of its report by the name of their matrices.
        trains: what clients train in place of their networks, in words; empty if it is these. In a comparison its
            optimiser and rate are its own, since those of networks have no meaning for it.
        family: the method under whose name its keys stand: itself, or the one that it is a `variant` of.
    """

    name: str
    traits: Traits | Callable[[Any], Traits] = field(default_factory=Traits)
    Parameters: type[options.Parameters] = options.Parameters
    server: str = ""
    client: str = ""
    common: Mapping[str, Value] = field(default_factory=dict, hash=False)
    own: Mapping[str, Value] = field(default_factory=dict, hash=False)
    drawings: Mapping[str, Drawing] = field(default_factory=dict, hash=False)
    trains: str = ""
    family: str = ""

    def __post_init__(self) -> None:
        """Stand by itself unless it is a variant."""
        if not self.family:
            object.__setattr__(self, "family", self.name)

    def variant(self, name: str, **changes: Any) -> "Method":
        """A method with the keys of this one that differs in something else, such as a control in a study.

        Args:
            name: its own name.
            changes: of the other attributes; `server` and `client` may be classes.
        """
        for side in {"server", "client"} & changes.keys():
            if isinstance(each := changes[side], type):
                changes[side] = f"{each.__module__}:{each.__qualname__}"
        return replace(self, name=name, family=self.family, **changes)

    @property
    def settles_rounds(self) -> bool:
        """Whether it has a use for `rounds = 0`, as its own value is: as many as it needs."""
        return self.common.get("rounds") == 0

    @property
    def one_shot(self) -> bool:
        """Whether its paper's method is a single round."""
        return self.common.get("rounds") == 1

    def traits_of(self, parameters: options.Parameters) -> Traits:
        """The answers for these parameters."""
        return self.traits(parameters) if callable(self.traits) else self.traits

"""Sharing maps: a map from the arrays of a client's network to shared keys.

The server averages each key over the clients that have it, and each client receives its keys. FedAvg, FedRep,
LG-FedAvg, averages within architectures and averages by layer are five such maps.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # methods name their map, and are listed without torch
    from torch import Tensor, nn

    from fedhet.models.arrays import Kind


@dataclass(frozen=True, eq=False)
class NetworkDescription:
    """A client's network with the names of its head's module and of its architecture, the input of a sharing map."""

    model: "nn.Module"
    head: str
    architecture: str

    @cached_property
    def kinds(self) -> "Mapping[str, Kind]":
        """The kind of each array of the network's state dict."""
        from fedhet.models.arrays import kinds_of

        return kinds_of(self.model)


Keys = Callable[[NetworkDescription], Callable[[str], str | None]]
"""A function of a network that returns the shared key for the name of an array; None if it is not shared."""

Units = Callable[[int, int, int], Sequence[int]]
"""A function of the client's number of units in a hidden layer, the number of all units and the round (from 0): it
returns the units that the client has, in the client's order."""


@dataclass(frozen=True)
class Sharing:
    """A sharing map, and how the server uses it.

    Attributes:
        keys: the map, or `"everything"`, each array under its own name, or `"nothing"`. Only a method that shares
            everything has a global model.
        averaged: whether the server averages each key, so that its arrays must be alike for all clients; otherwise
            arrays are only sent.
        statistics: whether running statistics are always sent, or as configured (`batch-norm`).
        units: if clients may have parts of arrays, the units of each hidden layer that they have; the server then
            averages each entry over the clients that have it.

    Raises:
        ValueError: clients have parts of arrays that are not averaged.
    """

    keys: Keys | Literal["everything", "nothing"]
    averaged: bool = True
    statistics: Literal["configured", "always"] = "configured"
    units: Units | None = None

    def __post_init__(self) -> None:
        """Check that the fields fit together."""
        if self.units and not (self.averaged and self.keys != "nothing"):
            raise ValueError("clients have parts of arrays where these are shared and averaged")

    def names(self, network: NetworkDescription, arrays: Iterable[str], *, statistics: bool) -> dict[str, str]:
        """Return the shared key of each shared array of a state dict, by name, in its order.

        Args:
            network: the client's network.
            arrays: the names in its state dict.
            statistics: whether running statistics are aggregated in this run.
        """
        if self.keys == "nothing":
            return {}
        key_of: Callable[[str], str | None] = str if self.keys == "everything" else self.keys(network)
        everything = statistics or self.statistics == "always"
        sent = [name for name in arrays if everything or network.kinds[name] != "statistic"]
        return {name: key for name in sent if (key := key_of(name)) is not None}


def _body(network: NetworkDescription) -> Callable[[str], str | None]:
    return lambda name: None if name.startswith(f"{network.head}.") else name


def _head(network: NetworkDescription) -> Callable[[str], str | None]:
    return lambda name: f"head{name.removeprefix(network.head)}" if name.startswith(f"{network.head}.") else None


def _trained(network: NetworkDescription) -> Callable[[str], str | None]:
    from fedhet.models.arrays import tied_names

    trained = {name for name, kind in network.kinds.items() if kind == "trained"} - tied_names(network.model).keys()
    return lambda name: name if name in trained else None


def _architecture(network: NetworkDescription) -> Callable[[str], str | None]:
    return lambda name: f"{network.architecture}/{name}"


def layers(network: NetworkDescription) -> "Iterator[tuple[str, Mapping[str, Tensor]]]":
    """Yield each layer's kind (class, options and shapes of arrays) and arrays by name, in the model's order."""
    for name, module in network.model.named_modules():
        arrays = {key: tensor for key, tensor in module.state_dict().items() if "." not in key}
        if arrays:
            shapes = ",".join("x".join(map(str, tensor.shape)) for tensor in arrays.values())
            options = [getattr(module, key) for key in ("stride", "groups", "dilation") if hasattr(module, key)]
            kind = f"{type(module).__name__}({shapes};{options})".replace(" ", "")
            yield kind, {f"{name}.{key}".removeprefix("."): tensor for key, tensor in arrays.items()}


def _type_order(network: NetworkDescription) -> Callable[[str], str | None]:
    """Key arrays by the layer's kind and its number in it; normalisations belong to the layer before them."""
    counts: Counter[str] = Counter()
    keys: dict[str, str] = {}
    before = ""
    for kind, arrays in layers(network):
        follows = all(tensor.ndim < 2 for tensor in arrays.values())
        place = f"{before}+{kind}" if follows else kind
        counts[place] += 1
        layer = f"{place}#{counts[place]}"
        before = before if follows else layer
        keys |= {name: f"{layer}.{name.rpartition('.')[2]}" for name in arrays}
    return keys.get


def _first_layers(network: NetworkDescription) -> Callable[[str], str | None]:
    """Key arrays by the kinds of their layer and all earlier ones, so that networks share only equal first layers."""
    keys: dict[str, str] = {}
    kinds = ""
    for number, (kind, arrays) in enumerate(layers(network), 1):
        kinds += f"/{kind}"
        layer = f"{number}-{kind}@{sha256(kinds.encode()).hexdigest()[:16]}"
        keys |= {name: f"{layer}.{name.rpartition('.')[2]}" for name in arrays}
    return keys.get


def _first_units(few: int, whole: int, round: int) -> Sequence[int]:
    return range(few)


def _window(few: int, whole: int, round: int) -> Sequence[int]:
    return [(round + place) % whole for place in range(few)]


EVERYTHING = Sharing("everything")
FIRST_UNITS = Sharing("everything", units=_first_units)
ROLLING_UNITS = Sharing("everything", units=_window)
TRAINED = Sharing(_trained, units=_first_units)
BODY = Sharing(_body)
HEAD = Sharing(_head)
NOTHING = Sharing("nothing")
WITHIN_ARCHITECTURES = Sharing(_architecture)
BY_TYPE_AND_ORDER = Sharing(_type_order)
BY_FIRST_LAYERS = Sharing(_first_layers)

"""Which arrays of a client's network are shared, and under which keys (`Sharing`).

The server averages arrays with the same key. FedAvg, FedRep, LG-FedAvg and averages by layer differ only in the keys.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Literal

from fedhet.errors import ModelError

if TYPE_CHECKING:  # methods name their map, and are listed without torch
    from torch import Tensor, nn

    from fedhet.models.copies import Kind


@dataclass(frozen=True, eq=False)
class NetworkDescription:
    """A client's network (`model`), with the names of its head's module (`head`) and of its `architecture`."""

    model: "nn.Module"
    head: str
    architecture: str

    @cached_property
    def kinds(self) -> "Mapping[str, Kind]":
        """The kind of each array of the state dict, by name: trained, frozen, a running statistic or another buffer."""
        from fedhet.models.copies import kinds_of

        return kinds_of(self.model)


Keys = Callable[[NetworkDescription], Callable[[str], str | None]]
"""A function that takes a network's description and returns a function from the name of an array in its state dict to
the key under which the array is shared, or None if it is not. Arrays of different clients with one key correspond."""

Units = Callable[[int, int, int], Sequence[int]]
"""A function that returns the indices of a client's units in a hidden layer of the whole network, given the numbers of
the client's units and of all units in the layer, and the round (from 0)."""


@dataclass(frozen=True)
class Sharing:
    """Which arrays of the clients' networks are shared, and how the server uses them.

    Attributes:
        keys: the function that gives a key to each shared array (see `Keys`); arrays of different clients with one key
            correspond. `"everything"` shares all arrays, with their names as keys, `"nothing"` shares none. Only a
            method that shares everything has a global model.
        averaged: whether the server averages the arrays of each key, which must then have the same shape for all
            clients; otherwise, the method's server class uses them.
        statistics: when running statistics are sent: `"always"`, or `"configured"`: only if `batch-norm = aggregate`.
        units: the function that selects a client's units in each hidden layer, if clients have parts of one network.
            Each entry of an array is then averaged over the clients that have it.
    """

    keys: Keys | Literal["everything", "nothing"]
    averaged: bool = True
    statistics: Literal["configured", "always"] = "configured"
    units: Units | None = None

    def names(self, network: NetworkDescription, arrays: Iterable[str], *, statistics: bool) -> dict[str, str]:
        """Map names in `arrays` that are shared to their keys; `statistics`: whether running statistics are shared."""
        if self.keys == "nothing":
            return {}
        key_of: Callable[[str], str | None] = str if self.keys == "everything" else self.keys(network)
        everything = statistics or self.statistics == "always"
        sent = [name for name in arrays if everything or network.kinds[name] != "statistic"]
        return {name: key for name in sent if (key := key_of(name)) is not None}


def _head(network: NetworkDescription) -> Callable[[str], str | None]:
    inside = {name for name in _in_head(network) if name.startswith(f"{network.head}.")}
    return lambda name: f"head{name.removeprefix(network.head)}" if name in inside else None


def _body(network: NetworkDescription) -> Callable[[str], str | None]:
    inside = _in_head(network)
    return lambda name: None if name in inside else name


def _in_head(network: NetworkDescription) -> set[str]:
    """Return all names of the head's arrays; raise a ModelError if another layer has one of them, too."""
    from fedhet.models.copies import tied_names

    modules = dict(network.model.named_modules(remove_duplicate=False))
    head = {*modules[network.head].modules()}
    inside = {name for name in network.model.state_dict() if modules.get(name.rpartition(".")[0]) in head}
    for name, first in tied_names(network.model).items():
        if (name in inside) != (first in inside):
            raise ModelError(
                f"{first} and {name} are one array, but the method shares either the head '{network.head}' or other "
                "layers: give the head its own (tie_word_embeddings=False in transformers), or choose another method"
            )
    return inside


def _trained(network: NetworkDescription) -> Callable[[str], str | None]:
    from fedhet.models.copies import tied_names

    trained = {name for name, kind in network.kinds.items() if kind == "trained"} - tied_names(network.model).keys()
    return lambda name: name if name in trained else None


def layers(network: NetworkDescription) -> "Iterator[tuple[str, Mapping[str, Tensor]]]":
    """Yield each layer's description (class, shapes, options such as stride) and arrays, by name in the state dict."""
    for name, module in network.model.named_modules():
        arrays = {key: tensor for key, tensor in module.state_dict().items() if "." not in key}
        if arrays:
            shapes = ",".join("x".join(map(str, tensor.shape)) for tensor in arrays.values())
            options = [getattr(module, key) for key in ("stride", "groups", "dilation") if hasattr(module, key)]
            kind = f"{type(module).__name__}({shapes};{options})".replace(" ", "")
            yield kind, {f"{name}.{key}".removeprefix("."): tensor for key, tensor in arrays.items()}


def _type_order(network: NetworkDescription) -> Callable[[str], str | None]:
    """Return a function from an array's name to the key under which it is shared; None for a name without a layer.

    Keys name the layer's class, shapes and options such as stride, its number among the network's layers with the same
    ones, and the array. Keys of a layer with vectors only, such as a norm, also name the last other layer before it.
    """
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
    """Return a function from an array's name to the key under which it is shared; None for a name without a layer.

    Arrays of two networks have one key if all layers up to theirs have equal classes, shapes and options (stride etc.).
    """
    keys: dict[str, str] = {}
    kinds = ""
    for number, (kind, arrays) in enumerate(layers(network), 1):
        kinds += f"/{kind}"
        layer = f"{number}-{kind}@{sha256(kinds.encode()).hexdigest()[:16]}"
        keys |= {name: f"{layer}.{name.rpartition('.')[2]}" for name in arrays}
    return keys.get


EVERYTHING = Sharing("everything")
FIRST_UNITS = Sharing("everything", units=lambda few, whole, round: range(few))
ROLLING_UNITS = Sharing("everything", units=lambda few, whole, round: [(round + k) % whole for k in range(few)])
TRAINED = Sharing(_trained, units=FIRST_UNITS.units)
BODY = Sharing(_body)
HEAD = Sharing(_head)
NOTHING = Sharing("nothing")
WITHIN_ARCHITECTURES = Sharing(lambda network: lambda name: f"{network.architecture}/{name}")
BY_TYPE_AND_ORDER = Sharing(_type_order)
BY_FIRST_LAYERS = Sharing(_first_layers)

"""Methods whose clients train parts of one network: narrower layers, its first blocks, or adapters of a lower rank."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import product
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedhet.algorithms.graphs import PermutationGroups, entries_of, widths_of
from fedhet.algorithms.graphs.blocks import Exits
from fedhet.algorithms.matching import groups_from_json
from fedhet.errors import ConfigError
from fedhet.messages import Arrays, Payload, Reply, Spec, WireError, check, load_into
from fedhet.messages.protocol import WHOLE
from fedhet.methods.options import Config, Options, Value, listed, option
from fedhet.methods.sharing import FIRST_UNITS, Units
from fedhet.server import Common, FederatedStrategy, State, Traits, average_shared, in_order

PARTS = Traits(networks="parts", shares=FIRST_UNITS, common_init=True, inside="")
"""Traits of methods whose clients have the first units of each hidden layer."""

LARGEST_COUNT = 2**16
"""The largest depth (number of blocks) or rank that can be configured."""


class SubmodelKeys(Options):
    """Base class of the keys of methods whose clients have submodels, of different sizes, of one network.

    `size_name` says what a size is: a `width` (fraction of each hidden layer's units), a `depth` (number of the
    network's first blocks) or a `rank` (of low-rank adapters). `counted` is True for depths and ranks, which are whole
    numbers; the whole network then has the largest. The key with the plural name, such as `widths`, lists the sizes.
    """

    uses = ("assign",)
    size_name: ClassVar[str] = "width"
    counted: ClassVar[bool] = False

    @cached_property
    def all_sizes(self) -> tuple[float, ...]:
        """Clients' widths (fractions), depths (numbers of blocks) or ranks in configured order; checks their values."""
        key = f"{self.size_name}s"
        return tuple(self._size(size, key) for size in listed(getattr(self, key)) or [""])

    @property
    def largest(self) -> float:
        """The size of the whole network: the largest configured depth or rank, or 1 for widths."""
        return max(self.all_sizes) if self.counted else 1.0

    @property
    def sizes(self) -> tuple[float, ...]:
        """The different widths (fractions), depths (numbers of blocks) or ranks to assign to clients, largest first."""
        return tuple(sorted({*self.all_sizes}, reverse=True))

    @property
    def all_widths(self) -> tuple[float, ...]:
        """The widths, depths or ranks for clients in configured order, as fractions of the whole network's."""
        return tuple(size / self.largest for size in self.all_sizes)

    def width_at(self, node_config: Mapping[str, Any]) -> float | None:
        """Return the node config's `width`, `depth` or `rank` as a fraction of the largest; None if it is not set."""
        chosen = node_config.get(self.size_name)
        if chosen is None:
            return None
        return self._size(chosen, f"the node's {self.size_name}", self.largest) / self.largest

    def _size(self, value: object, name: str, most: float = math.inf) -> float:
        most = min(most, LARGEST_COUNT if self.counted else 1)
        with suppress(ValueError):
            if 0 < (size := int(str(value)) if self.counted else float(str(value))) <= most:
                return size
        valid = f"a whole number from 1 to {most:g}" if self.counted else "the fraction of units, above 0 and at most 1"
        raise ConfigError(f"{name}: {value!r} is not a valid {self.size_name}: set {valid}")

    def check(self, config: Config) -> None:
        """Check that sizes are valid and `shared-init` is true; raise a ConfigError otherwise."""
        try:
            _ = self.all_sizes
        except ConfigError as error:
            raise ConfigError(f"{config.family}.{error}") from error
        if not config.shared_init:
            raise ConfigError(f"{config.method_name}'s clients start from parts of one network: set shared-init = true")


@dataclass(frozen=True)
class DepthKeys(SubmodelKeys):
    """Keys of methods whose clients have the first blocks of one network."""

    size_name = "depth"
    counted = True

    depths: str = option("4,3,2,1", "numbers of blocks, assigned as `assign` says; a node may set its own as depth")
    blocks: str = option("", "names of the modules that end blocks, separated by commas; empty: found by spatial size")

    def suited(self) -> dict[str, tuple[Value, str]]:
        """Return {"blocks": ("", reason)}: users' models get blocks by spatial size; {} if `blocks` is empty."""
        return {"blocks": ("", "since the preset names modules of its network, not of yours")} if self.blocks else {}


Indices = NDArray[np.intp]
Part = tuple[Indices | None, ...]
"""A client's part of an array: its indices along each axis (None for all), or () if the client lacks the array."""
Place = Any
"""An index into an array: `...` for the whole array, or the result of `np.ix_`."""
Parts = Mapping[str, Part]
"""A client's parts of arrays by name; arrays that the client has whole are left out."""


@dataclass
class SubmodelState(State):
    """The state of a method whose clients train parts of one network; `network` describes the whole network (JSON)."""

    network: str = ""


P = TypeVar("P", bound=SubmodelKeys)
D = TypeVar("D", bound=DepthKeys)
T = TypeVar("T", bound=SubmodelState)


class SubmodelStrategy(FederatedStrategy[P, T]):
    """A strategy that sends each client its part of a network, and averages each entry over clients that have it."""

    def common(self, reply: Reply) -> Mapping[str, Common]:
        described(reply.report.groups, reply.report.spec)
        size = self.options.size_name
        remedy = f"all clients must train parts of one architecture, chosen by {size}"
        return {"digest of the whole network": Common(sha256(reply.report.groups.encode()).hexdigest()[:12], remedy)}

    def admit(self, reply: Reply) -> None:
        self.state.network = reply.report.groups

    def first_model(self, reply: Reply) -> Arrays:
        if WHOLE not in reply.arrays:
            return super().first_model(reply)
        groups = read_network(self.state.network)
        shapes = groups.shapes(groups.widths)
        spec = self.federation.specs[reply.client]
        expected = {name: (shapes[name], dtype) for name, (_, dtype) in spec.items()}
        check(reply.arrays[WHOLE], expected, "the client's whole network")
        return reply.arrays[WHOLE]

    def parts(self, client: str) -> Parts:
        """Return the client's part of each array in this round; arrays that it has whole are left out."""
        units = self.traits.shares.units
        return parts_of(self.state.network, units, self._widths(client), self.run.round.number) if units else {}

    def payload_for(self, client: str) -> Payload:
        shared = self.state.model
        spec = self.federation.specs[client]
        model = self.aggregator.once(
            (tuple(spec), self._widths(client), self.run.round.number),
            lambda: cut({key: shared[key] for key in shared if key in spec}, self.parts(client)),
        )
        return Payload({"model": model} if model else {})

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        models = {client: reply.arrays["model"] for client, reply in replies.items()}
        parts = {client: self.parts(client) for client in models}
        self.state.model = self.state.model | self.average_entries(models, self.aggregator.weights(replies), parts)
        return {}

    def average_entries(
        self, models: Mapping[str, Arrays], weights: Mapping[str, float], parts: Mapping[str, Parts]
    ) -> Arrays:
        """Return the average of each array entry over the clients that have it; other entries keep their value.

        `models` has each client's arrays, `weights` its weight, and `parts` says which entries of the arrays it has.
        """
        before = self.state.model
        models = self.aggregator.clipped(models, {client: cut(before, parts.get(client, {})) for client in models})
        pieces: dict[str, Arrays] = {client: {} for client in models}
        places: dict[str, tuple[str, Place]] = {}  # the array of a piece, and its index there
        for key in dict.fromkeys(key for model in models.values() for key in model):
            entries = {client: parts.get(client, {}).get(key) for client, model in models.items() if key in model}
            arrays = {client: models[client][key] for client in entries}
            blocks: Iterable[tuple[list[str], Place]] = [(list(entries), ...)]
            if any(entries.values()):
                blocks = _blocks(entries, before[key].shape)
                for client, part in entries.items():
                    if part is not None:  # back to its places in the whole array
                        whole = np.empty(before[key].shape, arrays[client].dtype)
                        whole[_index(whole.shape, part)] = arrays[client]
                        arrays[client] = whole
            for owners, place in blocks:
                name = str(len(places))
                places[name] = key, place
                for client in owners:
                    pieces[client][name] = np.asarray(arrays[client][place], order="C")
        average: Arrays = {}
        for name, array in average_shared(pieces, weights, self.config.aggregation, self.config.byzantine).items():
            key, place = places[name]
            average.setdefault(key, array if place is ... else before[key].astype(array.dtype))[place] = array
        return average

    def size_of(self, client: str) -> str:
        few = self._widths(client)
        most = read_network(self.state.network).widths
        if few == most:
            return ""
        keys = self.options
        share = few[0] / most[0]
        shares = {f"{size:g}": size / keys.largest for size in keys.sizes}
        nearest = min(shares, key=lambda size: abs(shares[size] - share))
        # A node may have chosen a size that is not configured.
        configured = abs(shares[nearest] - share) < 1 / most[0]
        return f"{keys.size_name} {nearest if configured else format(share, '.2g')}"

    def _widths(self, client: str) -> tuple[int, ...]:
        shapes = {name: shape for name, (shape, _) in self.federation.specs[client].items()}
        return widths_of(shapes, read_network(self.state.network))


class ByDepth(SubmodelStrategy[D, T]):
    """Base class of strategies that average each array over the clients whose network is deep enough to have it."""

    def global_model(self) -> nn.Module | None:
        if not self.has_global_model:
            return None
        groups = read_network(self.state.network)
        model = Exits(self.run.network_like(in_order(self.state.clients)[0]), groups[0].width)
        model.add_exits(groups)
        if model.state_dict().keys() - self.state.model.keys():
            return None
        load_into(model.state_dict(), self.state.model)
        return model


read_network = lru_cache(maxsize=8)(groups_from_json)
"""Cached function from a network's description as JSON to `PermutationGroups`: its hidden layers and their arrays."""


def described(description: str, spec: Spec, *, complete: bool = False) -> PermutationGroups:
    """Return a network's permutation groups (sets of interchangeable hidden units) from its `description` (JSON).

    `spec` has names, shapes and dtypes of a client's shared arrays; a WireError is raised if they are not parts of the
    network's arrays. Arrays of the last layers may be missing unless `complete` is true.
    """
    try:
        groups = read_network(description)
        widths = widths_of({name: shape for name, (shape, _) in spec.items()}, groups)
        for few, group in zip(widths, groups, strict=True):
            if few > group.width:
                raise ValueError(f"layer {group.name[:100]} has {few} units, but must have at most {group.width}")
        shapes = groups.shapes(widths)
        for name, (shape, _) in spec.items():
            if shapes[name] != shape:
                raise ValueError(f"the array {name[:100]} has shape {list(shape)}, but must have {list(shapes[name])}")
        lacking = [name for name in (shapes if complete else groups.needs) if name in shapes.keys() - spec.keys()]
        if lacking := [name for name in lacking if groups.kinds.get(name) != "statistic"]:
            raise ValueError(f"the network has an array {lacking[0][:100]}, which the client does not send")
        return groups
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise WireError(
            f"the client's arrays do not fit the network described in its handshake ({error}): check its model and mods"
        ) from error


@lru_cache(maxsize=64)
def parts_of(network: str, units: Units, widths: tuple[int, ...], round: int) -> Parts:
    """Return, by array name, the indices along each axis of entries that a client trains in a round (from 1).

    `network` describes the whole network (JSON), and `widths` has the client's number of units in each hidden layer.
    `units` returns the indices of a layer's units, given the client's and the total number of units and the round.
    """
    groups = read_network(network)
    sizes = enumerate(zip(widths, groups.widths, strict=True))
    chosen = {
        index: np.array(units(few, most, max(round - 1, 0)), np.intp) for index, (few, most) in sizes if few < most
    }
    return entries_of(groups, chosen)


def cut(arrays: Arrays, parts: Parts) -> Arrays:
    """Return the entries of arrays at `parts`, which has a client's indices along each axis by name of the array.

    An array without an entry in `parts` is returned whole; one whose entry is an empty tuple is left out.
    """
    had = {key: array for key, array in arrays.items() if parts.get(key) != ()}
    return {key: array[_index(array.shape, parts[key])] if key in parts else array for key, array in had.items()}


def _blocks(parts: Mapping[str, Part | None], shape: tuple[int, ...]) -> Iterator[tuple[list[str], Place]]:
    """Divide an array of this `shape` into blocks that the same clients have; yield the clients and the block's index.

    `parts` has each client's indices along each axis (None for all of an axis), or None for a client with all entries.
    """
    axes = []
    for axis, size in enumerate(shape):
        having = np.ones((len(parts), size), bool)
        for row, part in zip(having, parts.values(), strict=True):
            if part is not None and (indices := part[axis]) is not None:
                row[:] = np.isin(np.arange(size), indices)
        patterns, which = np.unique(having, axis=1, return_inverse=True)
        axes.append([(pattern, np.flatnonzero(which.ravel() == number)) for number, pattern in enumerate(patterns.T)])
    for blocks in product(*axes):
        owners = np.logical_and.reduce([pattern for pattern, _ in blocks])
        if owners.any():
            yield [client for client, has in zip(parts, owners, strict=True) if has], np.ix_(*(at for _, at in blocks))


def _index(shape: tuple[int, ...], part: Part) -> tuple[Any, ...]:
    return np.ix_(*(np.arange(size) if at is None else at for at, size in zip(part, shape, strict=True)))

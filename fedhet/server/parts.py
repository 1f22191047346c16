"""Averages of arrays of which clients have parts: each entry is averaged over the clients that have it.

A part of an array is an index set for each axis: the entries along it that the client has, in the client's order.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhet.errors import FedhetError
from fedhet.graphs import PermutationGroups, entries_of, widths_of
from fedhet.matching import understand
from fedhet.server.run import Run
from fedhet.sharing import Units
from fedhet.wire import Arrays, Report, Spec, WireError

Indices = NDArray[np.intp]
Part = tuple[Indices | None, ...]
"""The entries along each axis; None for an axis that the client has whole. (): the client lacks the array."""
Parts = Mapping[str, Part]
"""By shared key, the arrays of which a client has only a part."""


class Sizes:
    """The widths in which clients have one network, by the permutation groups of the whole that they report."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._first: tuple[str, str] | None = None  # the groups as text, and the first client that sent them
        self._dtypes: dict[str, str] = {}
        self._parts: dict[tuple[tuple[int, ...], int], dict[str, Part]] = {}

    @property
    def _units(self) -> Units | None:
        return self._run.traits.shares.units

    def check(self, report: Report) -> None:
        """Check in the handshake that a client has the same network as the others, or a part of it, in their dtypes.

        Raises:
            WireError: its arrays are no part of the network that it describes.
            FedhetError: it has a part of another network.
        """
        if self._units is None:
            return
        if self._first is not None and report.groups != self._first[0]:
            raise FedhetError(
                f"it has a part of another network than client {self._first[1]}: all clients need one architecture, "
                f"of which each may have a part ({self._run.config.parameters.size_name})"
            )
        try:
            groups = understand(report.groups) if self._first is None else self._groups
            widths = widths_of({name: shape for name, (shape, _) in report.spec.items()}, groups)
            if any(few > most for few, most in zip(widths, groups.widths, strict=True)):
                raise ValueError("it is wider than the whole")
            shapes = groups.shapes(widths)
            if any(shapes[name] != shape for name, (shape, _) in report.spec.items()):
                raise ValueError("its arrays have other shapes than it describes")
            lacking = [name for name in groups.needs if name in shapes.keys() - report.spec.keys()]
            if lacking := [name for name in lacking if groups.kinds.get(name) != "statistic"]:
                raise ValueError(f"it lacks {lacking[0]}")
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise WireError(f"its arrays are no part of the network that it describes: {error}") from error
        for name, (_, dtype) in report.spec.items():
            if (known := self._dtypes.get(name, dtype)) != dtype:
                raise FedhetError(f"its {name} is {dtype}, that of the other clients {known}: they must be alike")

    def admit(self, report: Report) -> None:
        """Admit a checked client; the first one's network is the network of all."""
        if self._units is not None and self._first is None:
            self._first, self._groups = (report.groups, report.client), understand(report.groups)
        self._dtypes |= {name: dtype for name, (_, dtype) in report.spec.items()}

    def whole(self, spec: Spec) -> Spec:
        """Return shapes and dtypes of the whole arrays of which a client has these parts."""
        if self._units is None:
            return spec
        shapes = self._groups.shapes(self._groups.widths)
        return {name: (shapes[name], dtype) for name, (_, dtype) in spec.items()}

    def words(self, spec: Spec) -> str:
        """Return the size of a client with these arrays, such as `width 0.5`; empty if it has the whole network."""
        if self._units is None:
            return ""
        few, most = widths_of({name: shape for name, (shape, _) in spec.items()}, self._groups), self._groups.widths
        if few == most:
            return ""
        keys, share = self._run.config.parameters, few[0] / most[0]
        shares = {f"{size:g}": keys.width_at({keys.size_name: size}) or 1.0 for size in keys.sizes}
        nearest = min(shares, key=lambda size: abs(shares[size] - share))
        known = abs(shares[nearest] - share) < 1 / most[0]  # a node may have said another one
        return f"{keys.size_name} {nearest if known else format(share, '.2g')}"

    def parts(self, spec: Spec, round: int) -> Parts:
        """Return the parts of a client with these arrays in a round (from 1); clients of one width share the object."""
        if (chosen := self._units) is None:
            return {}
        groups: PermutationGroups = self._groups
        widths = widths_of({name: shape for name, (shape, _) in spec.items()}, groups)
        if (widths, round) not in self._parts:
            self._parts = {key: parts for key, parts in self._parts.items() if key[1] == round}
            sizes = enumerate(zip(widths, groups.widths, strict=True))
            units = {
                index: np.array(chosen(few, most, max(round - 1, 0)), np.intp)
                for index, (few, most) in sizes
                if few < most
            }
            self._parts[widths, round] = entries_of(groups, units)
        return self._parts[widths, round]


def cut(arrays: Arrays, parts: Parts) -> Arrays:
    """Return parts of arrays; whole arrays are not copied."""
    had = {key: array for key, array in arrays.items() if parts.get(key) != ()}
    return {key: array[_index(array.shape, parts[key])] if key in parts else array for key, array in had.items()}


def split(
    models: Mapping[str, Arrays], specs: Mapping[str, Spec], parts: Mapping[str, Parts], wholes: Arrays
) -> tuple[dict[str, Arrays], dict[str, Spec], dict[str, tuple[str, Sequence[Indices] | None]]]:
    """Split what clients sent into pieces such that all entries of a piece belong to the same clients.

    Args:
        models: what each client sent, by key.
        specs: shapes and dtypes of each client's keys.
        parts: the parts that each client has.
        wholes: the whole arrays, by key.

    Returns:
        Pieces by client and name, their shapes and dtypes by client, and by name the key of each piece and its entries
        along each axis, None for an array that all clients have whole.
    """
    pieces: dict[str, Arrays] = {client: {} for client in models}
    kinds: dict[str, Spec] = {client: {} for client in models}
    places: dict[str, tuple[str, Sequence[Indices] | None]] = {}
    for key in dict.fromkeys(key for model in models.values() for key in model):
        by_client = {client: parts.get(client, {}).get(key) for client, model in models.items() if key in model}
        for owners, place in (
            [(list(by_client), None)] if not any(by_client.values()) else _pieces(by_client, wholes[key].shape)
        ):
            name = str(len(places))
            places[name] = key, place
            for client in owners:
                array = models[client][key]
                if place is not None:
                    array = array[np.ix_(*_local(place, by_client[client] or (None,) * len(place), wholes[key].shape))]
                pieces[client][name] = np.asarray(array, order="C")
                kinds[client][name] = array.shape, specs[client][key][1]
    return pieces, kinds, places


def joined(pieces: Arrays, places: Mapping[str, tuple[str, Sequence[Indices] | None]], before: Arrays) -> Arrays:
    """Join pieces into whole arrays; entries without a piece keep their value of before."""
    whole: Arrays = {}
    for name, array in pieces.items():
        key, place = places[name]
        if place is None:
            whole[key] = array
        else:
            whole.setdefault(key, before[key].astype(array.dtype))[np.ix_(*place)] = array
    return whole


def _pieces(
    parts: Mapping[str, Part | None], shape: tuple[int, ...]
) -> Iterator[tuple[list[str], tuple[Indices, ...]]]:
    """Yield blocks of an array that the same clients have whole, with these clients."""
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
            yield [client for client, has in zip(parts, owners, strict=True) if has], tuple(at for _, at in blocks)


def _local(place: Sequence[Indices], part: Part, shape: tuple[int, ...]) -> list[Indices]:
    """Return the entries of a block in the client's order."""
    local = []
    for at, indices, size in zip(place, part, shape, strict=True):
        if indices is not None:
            position = np.zeros(size, np.intp)
            position[indices] = np.arange(len(indices))
            at = position[at]
        local.append(at)
    return local


def _index(shape: tuple[int, ...], part: Part) -> tuple[Any, ...]:
    return np.ix_(*(np.arange(size) if at is None else at for at, size in zip(part, shape, strict=True)))

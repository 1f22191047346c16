"""The axes of arrays as sequences of segments: ranges of indices that belong to hidden units or are never permuted."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import lcm, prod

from fedhet.algorithms.graphs.graph import ArchitectureGraph, Node

VALUE = "value"
"""Role of a parameter that is used outside any layer; other roles are names within a layer, as ``weight``."""


@dataclass(frozen=True)
class Segment:
    """A range of consecutive indices of an array's axis, with ``block`` entries for each of ``width`` hidden units.

    ``group`` is the index of the units' permutation group (a set of interchangeable units), or None for fixed entries.
    """

    group: int | None
    width: int
    block: int = 1

    @property
    def size(self) -> int:
        """Number of entries in the segment."""
        return self.width * self.block


Axis = tuple[Segment, ...]
Value = tuple[Axis, ...]  # the axes of one value that flows through a graph


def fixed(size: int) -> Axis:
    """Return an axis (tuple of segments) of `size` entries that no permutation of hidden units moves."""
    return (Segment(None, size),)


def entries(axis: Axis) -> int:
    """Return the length of an axis: the sum of the sizes of its segments (ranges of indices)."""
    return sum(segment.size for segment in axis)


def moving(*axes: Axis) -> set[int]:
    """Return the numbers (`Segment.group`) of the sets of interchangeable hidden units that lie along these axes."""
    return {segment.group for axis in axes for segment in axis if segment.group is not None}


def scaled(axis: Axis, block: int, of: int = 1) -> Axis:
    """Return the axis with `block` entries in place of every `of` consecutive entries, as after a reshape."""
    return tuple(
        Segment(None, segment.size // of * block)
        if segment.group is None
        else replace(segment, block=segment.block // of * block)
        for segment in axis
    )


def joined(*axes: Axis) -> Axis:
    """Concatenate axes (tuples of `Segment`): empty segments are left out, and adjacent fixed segments merged."""
    result: list[Segment] = []
    for segment in (segment for axis in axes for segment in axis if segment.size):
        if segment.group is not None:
            result.append(segment)
        elif result and result[-1].group is None:
            result[-1] = Segment(None, result[-1].size + segment.size)
        else:
            result += fixed(segment.size)
    return tuple(result)


class _Misfit(Exception):
    """Raised if a constraint cannot be added: it would divide the entries of a hidden unit, or contradicts others."""


class Variables:
    """The constraints of the operators in `graph` on which of a network's hidden units must be permuted together.

    A variable stands for consecutive hidden units along an axis of a tensor, and has a number (`Segment.group`). A
    constraint says that two variables are equal, that several units are moved as one, that a variable consists of
    others, or that its units are never permuted. If a reshape divides an axis into several, hidden units are assumed to
    lie along the largest that is possible. `choices` maps a reshape node's name to another: 1 is the second largest.
    """

    def __init__(self, graph: ArchitectureGraph, choices: Mapping[str, int]) -> None:
        self.graph, self.choices = graph, choices
        self.meaning: dict[int | None, Axis] = {}  # the segments that replace a variable according to the constraints
        self.refusals: list[tuple[Axis, str]] = []  # axes without units to permute, with the message otherwise
        self.splits: list[tuple[str, Axis, int]] = []  # node that divides an axis, part with units, possible parts
        self.bound: dict[tuple[str, int], Axis] = {}  # by (parameter, axis); tied parameters have their first name
        self.written: dict[tuple[str, int], tuple[str, str]] = {}  # role and layer of axes along which outputs lie
        self.read: list[Axis] = []  # axes that layers sum over
        self.batch = next((node.shape[0] for node in graph if node.operator == "input"), 1)
        self._count = 0

    def new(self, width: int) -> Axis:
        """Return an axis of `width` hidden units without constraints so far, represented by a new variable."""
        self._count += 1
        return (Segment(self._count, width),)

    def known(self, axis: Axis) -> Axis:
        """Return `axis` with variables (sets of hidden units) replaced by what they are equal to by the constraints."""
        meaning = ((self.meaning.get(segment.group), segment) for segment in axis)
        return joined(*(scaled(self.known(found), each.block) if found else (each,) for found, each in meaning))

    def moves(self, *axes: Axis) -> set[int]:
        """Return the numbers of the sets of units (variables) along these axes that may still be permuted."""
        return moving(*map(self.known, axes))

    def pin(self, axis: Axis) -> None:
        """Add the constraint that the entries of an axis are never permuted."""
        for segment in self.known(axis):
            if segment.group is not None:
                self.meaning[segment.group] = fixed(segment.width)

    def refuse(self, axes: Iterable[Axis], reason: str) -> None:
        """Require that no units along these axes can be permuted; `reason` is the message of the error otherwise."""
        self.refusals += [(axis, reason) for axis in axes if self.moves(axis)]

    def unify(self, one: Axis, other: Axis, node: Node) -> Axis:
        """Constrain the units of two axes, which `node` combines, to be permuted alike; return the axis `one`."""
        try:
            self._unify(one, other)
        except _Misfit:
            self.refuse((one, other), f"{node} combines axes with different orders of hidden units: leave it out")
        return one

    def together(self, axis: Axis, count: int, node: Node) -> Axis:
        """Require that every `count` consecutive entries, which `node` combines, are moved as one; return the axis."""
        try:
            self._coarsen(axis, count)
        except _Misfit:
            self.refuse([axis], f"{node} takes {count} channels together, which divides units: change its groups")
            return fixed(entries(axis))
        return self.known(axis)

    def split(self, axis: Axis, sizes: Sequence[int], node: Node) -> list[Axis]:
        """Return the axes of these `sizes` into which the reshape `node` divides `axis`.

        Hidden units lie along one of them, by default the largest possible (see `choices`). The others have none.
        """
        if not self.moves(axis):
            return list(map(fixed, sizes))
        before = self.meaning
        ways = []
        for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
            self.meaning = dict(before)
            with suppress(_Misfit):
                way = self._split(axis, sizes, place)
                if self.meaning == before:
                    return way
                ways.append((way, place, self.meaning))
        self.meaning = before
        if not ways:
            self.refuse([axis], f"{node} divides units: do not reshape {entries(axis)} entries to {tuple(sizes)}")
            return list(map(fixed, sizes))
        way, place, self.meaning = ways[min(self.choices.get(node.name, 0), len(ways) - 1)]
        self.splits.append((node.name, way[place], len(ways)))
        return way

    def part(self, axis: Axis, count: int) -> Axis | None:
        """Require that `count` equal parts of `axis` are permuted alike; return the first, or None if impossible."""
        try:
            return self._split(axis, (count, entries(axis) // count), 1)[1]
        except _Misfit:
            return None

    def bind(self, node: Node, role: str, axis: int, layout: Axis | None, *, writes: bool) -> Axis:
        """Require that dimension `axis` of `node`'s parameter `role`, such as ``weight``, has the segments `layout`.

        Returns the dimension's segments (ranges of indices). If `layout` is None, they are one segment of new hidden
        units or, after an earlier call for this parameter and dimension, that call's result. `writes` says whether the
        layer's outputs lie along the dimension; otherwise, the layer sums over it.
        """
        name = node.parameters[role]
        place = name, axis
        if (bound := self.bound.get(place)) is not None:
            layout = bound if layout is None else self.unify(bound, layout, node)
        elif layout is None:
            layout = self.new(self.graph.shapes[name][axis])
        self.bound.setdefault(place, layout)
        if writes:
            self.written.setdefault(place, (role, name.rpartition(".")[0] or node.module or name))
        else:
            self.read.append(layout)
        return layout

    def refuse_moving(self, node: Node, axes: Iterable[Axis]) -> None:
        """Refuse the network if units along `axes` could be permuted, which would change the result of `node`."""
        self.refuse(axes, f"{node} works along hidden units, whose order or number changes its result: leave it out")

    def torn(self) -> list[tuple[Axis, str]]:
        """Return the axes whose units can be permuted although `refuse` forbids it, each with its error message."""
        return [(axis, reason) for axis, reason in self.refusals if self.moves(axis)]

    def other_way(self, axis: Axis) -> str | None:
        """Return the name of the last reshape with another possible result for the hidden units of `axis`, or None.

        The units could lie along a smaller one of the axes into which the reshape divides theirs (see `choices`).
        """
        for node, part, ways in reversed(self.splits):
            if self.choices.get(node, 0) < ways - 1 and self.moves(axis) & self.moves(part):
                return node
        return None

    def _unify(self, one: Axis, other: Axis) -> None:
        while self.known(one) != self.known(other):
            pair = next((a, b) for a, b in zip(self._pieces(one), self._pieces(other), strict=False) if a != b)
            small, large = sorted(pair, key=lambda segment: segment.width)
            if small.group is None or large.group is None:
                self.pin(pair)
            elif small.group == large.group:
                raise _Misfit
            elif small.block != large.block:
                block = lcm(small.block, large.block)
                for segment in pair:
                    self._coarsen((segment,), block)
            elif small.width < large.width:
                self._cut((large,), small.size)
            else:
                self.meaning[large.group] = (replace(small, block=1),)

    def _pieces(self, axis: Axis) -> Iterator[Segment]:
        for segment in self.known(axis):
            yield from (segment,) if segment.group is not None else fixed(1) * segment.size

    def _coarsen(self, axis: Axis, count: int) -> None:
        for segment in self.known(axis):
            factor = lcm(segment.block, count) // segment.block
            if segment.group is None or segment.group in self.meaning or factor == 1:
                continue  # fixed, constrained meanwhile, or of whole runs already
            if segment.width % factor:
                raise _Misfit
            self.meaning[segment.group] = scaled(self.new(segment.width // factor), factor)
        if any((segment.size if segment.group is None else segment.block) % count for segment in self.known(axis)):
            raise _Misfit

    def _cut(self, axis: Axis, size: int) -> tuple[Axis, Axis]:
        first: list[Segment] = []
        rest = list(self.known(axis))
        while size:
            segment = rest.pop(0)
            if segment.size > size:
                units, part = divmod(size, segment.block)
                if part:
                    raise _Misfit
                if segment.group is None:
                    parts = fixed(units) + fixed(segment.width - units)
                else:
                    parts = self.new(units) + self.new(segment.width - units)
                    self.meaning[segment.group] = parts
                segment, other = scaled(parts, segment.block)
                rest.insert(0, other)
            first.append(segment)
            size -= segment.size
        return tuple(first), tuple(rest)

    def _split(self, axis: Axis, sizes: Sequence[int], place: int) -> list[Axis]:
        outer = prod(sizes[:place])
        size = sizes[place]
        inner = prod(sizes[place + 1 :])
        first, rest = self._cut(axis, size * inner)
        for _ in range(outer - 1):
            part, rest = self._cut(rest, size * inner)
            self._unify(first, part)
        self._coarsen(first, inner)
        result = list(map(fixed, sizes))
        result[place] = scaled(self.known(first), 1, of=inner)
        return result

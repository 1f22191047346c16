"""Axes of arrays as rows of segments: units that move together, and what never moves."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod

from .graph import ArchitectureGraph, Node

VALUE = "value"
"""The role of a parameter that is no layer's own."""


@dataclass(frozen=True)
class Segment:
    """A run of an axis: ``width`` units of ``block`` consecutive entries each; with ``group`` None it never moves."""

    group: int | None
    width: int
    block: int = 1

    @property
    def size(self) -> int:
        """Entries of the axis that it covers."""
        return self.width * self.block


Axis = tuple[Segment, ...]
Value = tuple[Axis, ...]  # the axes of one value that flows through a graph


def fixed(size: int) -> Axis:
    """An axis that never moves."""
    return (Segment(None, size),)


def entries(axis: Axis) -> int:
    """How many entries an axis has."""
    return sum(segment.size for segment in axis)


def moving(*axes: Axis) -> set[int]:
    """The groups (or variables) along some axes."""
    return {segment.group for axis in axes for segment in axis if segment.group is not None}


def scaled(axis: Axis, block: int, of: int = 1) -> Axis:
    """Return the axis in which each run of so many (`of`) entries is replaced by a run of `block` ones."""
    return tuple(
        Segment(None, segment.size // of * block)
        if segment.group is None
        else replace(segment, block=segment.block // of * block)
        for segment in axis
    )


def joined(*axes: Axis) -> Axis:
    """Axes behind each other; neighbouring fixed runs become one, empty ones vanish."""
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
    """Units would have to be taken apart."""


@dataclass(frozen=True)
class Split:
    """A node that took an axis apart, the part along which its units were taken to lie, and how many ways there are."""

    node: str
    axis: Axis
    ways: int


class Variables:
    """The facts known about the units along a graph's axes; ``Segment.group`` is a variable here.

    A variable is a row of units of which nothing is known yet. What meets in the graph says more of it: that it is
    another one, that several of its units make one, that it consists of others behind each other, that it is fixed.

    Attributes:
        choices: Node -> which of the ways to take an axis apart it takes; the first one, if it is not named.
        meaning: Variable -> the row of segments that it turned out to be.
        refusals: Axes that must not move, each with why the model is refused if one does in the end.
        splits: In the order of the graph.
        bound: (Parameter, axis) -> what that axis consists of; tied parameters by their first name.
        written: (Parameter, axis) that makes units -> the parameter's role and its layer's name, in data-flow order.
        read: Axes along which a layer reads.
        batch: How many examples the graph was exported with.
    """

    def __init__(self, graph: ArchitectureGraph, choices: Mapping[str, int]) -> None:
        self.graph, self.choices = graph, choices
        self.meaning: dict[int, Axis] = {}
        self.refusals: list[tuple[Axis, str]] = []
        self.splits: list[Split] = []
        self.bound: dict[tuple[str, int], Axis] = {}
        self.written: dict[tuple[str, int], tuple[str, str]] = {}
        self.read: list[Axis] = []
        self.batch = next((node.shape[0] for node in graph if node.operator == "input"), 1)
        self._count = 0

    def new(self, width: int) -> Axis:
        """An axis of units that nothing is known about yet."""
        self._count += 1
        return (Segment(self._count, width),)

    def known(self, axis: Axis) -> Axis:
        """An axis as far as it is known now."""
        return joined(
            *(
                scaled(self.known(self.meaning[segment.group]), segment.block)
                if segment.group in self.meaning
                else (segment,)
                for segment in axis
            )
        )

    def moves(self, *axes: Axis) -> set[int]:
        """The variables that move along some axes, as far as is known now."""
        return moving(*map(self.known, axes))

    def pin(self, axis: Axis) -> None:
        """Say that an axis does not move."""
        for segment in self.known(axis):
            if segment.group is not None:
                self.meaning[segment.group] = fixed(segment.width)

    def refuse(self, axes: Iterable[Axis], reason: str) -> None:
        """Say that axes do not move, and that the model is refused unless something else fixes them."""
        self.refusals += [(axis, reason) for axis in axes if self.moves(axis)]

    def unify(self, one: Axis, other: Axis, node: Node) -> Axis:
        """One axis where two of one size meet: units become the same, small ones together the larger ones."""
        try:
            self._unify(one, other)
        except _Misfit:
            self.refuse((one, other), f"{node} joins two axes whose units lie differently")
        return one

    def together(self, axis: Axis, count: int, node: Node) -> Axis:
        """An axis of which each run of so many entries stays together."""
        try:
            self._coarsen(axis, count)
        except _Misfit:
            self.refuse([axis], f"{node} takes {count} channels together, which are not whole units")
            return fixed(entries(axis))
        return self.known(axis)

    def split(self, axis: Axis, sizes: Sequence[int], node: Node) -> list[Axis]:
        """Take an axis apart into several: its units lie along one of them, the others are fixed.

        If the axis is known to have such units already, along that one; else along the one with the most units, or at
        the node's choice the one with the next most.
        """
        if not self.moves(axis):
            return list(map(fixed, sizes))
        before, ways = self.meaning, []
        for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
            self.meaning = dict(before)
            try:
                way = self._split(axis, sizes, place)
            except _Misfit:
                continue
            if self.meaning == before:
                return way
            ways.append((way, place, self.meaning))
        self.meaning = before
        if not ways:
            self.refuse([axis], f"{node} takes units apart: an axis of {entries(axis)} entries into {tuple(sizes)}")
            return list(map(fixed, sizes))
        way, place, self.meaning = ways[min(self.choices.get(node.name, 0), len(ways) - 1)]
        self.splits.append(Split(node.name, way[place], len(ways)))
        return way

    def part(self, axis: Axis, count: int) -> Axis | None:
        """One of so many parts of an axis that have the same units; None if they cannot."""
        try:
            return self._split(axis, (count, entries(axis) // count), 1)[1]
        except _Misfit:
            return None

    def bind(self, node: Node, role: str, axis: int, layout: Axis | None, *, writes: bool) -> Axis:
        """Say what an axis of a parameter consists of; None: units of its own. Tied uses are unified."""
        name = node.parameters[role]
        place = name, axis
        if (known := self.bound.get(place)) is not None:
            layout = known if layout is None else self.unify(known, layout, node)
        elif layout is None:
            layout = self.new(self.graph.shapes[name][axis])
        self.bound.setdefault(place, layout)
        if writes:
            self.written.setdefault(place, (role, name.rpartition(".")[0] or node.module or name))
        else:
            self.read.append(layout)
        return layout

    def refuse_moving(self, node: Node, axes: Iterable[Axis]) -> None:
        """Refuse the model if one of these axes of a node's input moves."""
        self.refuse(
            axes, f"{node} works along an axis of hidden units: reordering or adding units would change its result"
        )

    def torn(self) -> list[tuple[Axis, str]]:
        """Return the refused axes that move after all, if they are hidden units."""
        hidden = self.hidden()
        return [(axis, reason) for axis, reason in self.refusals if self.moves(axis) & hidden]

    def hidden(self) -> set[int]:
        """Return the variables that layers write or read; others need not move, as of parameters outside of layers."""
        layers = [self.bound[place] for place, (role, _) in self.written.items() if role != VALUE]
        return self.moves(*layers, *self.read)

    def other_way(self, axis: Axis) -> Split | None:
        """Return the split to be done another way, so that an axis does not move: its own, or else the last one."""
        moved = self.moves(axis)
        others = [
            split
            for split in reversed(self.splits)
            if self.choices.get(split.node, 0) < split.ways - 1 and moved & self.moves(split.axis)
        ]
        return next((split for split in others if moving(split.axis) & moving(axis)), others[0] if others else None)

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
        """The segments of an axis, entry by entry where it is fixed."""
        for segment in self.known(axis):
            yield from (segment,) if segment.group is not None else fixed(1) * segment.size

    def _coarsen(self, axis: Axis, count: int) -> None:
        """Make units of as many entries as fill whole runs of so many."""
        for segment in self.known(axis):
            factor = lcm(segment.block, count) // segment.block
            if segment.group is None or segment.group in self.meaning or factor == 1:
                continue  # the last two: known by now to be of whole runs
            if segment.width % factor:
                raise _Misfit
            self.meaning[segment.group] = scaled(self.new(segment.width // factor), factor)
        if any((segment.size if segment.group is None else segment.block) % count for segment in self.known(axis)):
            raise _Misfit

    def _cut(self, axis: Axis, size: int) -> tuple[Axis, Axis]:
        """Cut an axis behind so many entries; units on both sides are of different kinds from now on."""
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
        """Take an axis apart, with the units along one part: alike for all before it, and whole for all behind it."""
        outer, size, inner = prod(sizes[:place]), sizes[place], prod(sizes[place + 1 :])
        first, rest = self._cut(axis, size * inner)
        for _ in range(outer - 1):
            part, rest = self._cut(rest, size * inner)
            self._unify(first, part)
        self._coarsen(first, inner)
        result = list(map(fixed, sizes))
        result[place] = scaled(self.known(first), 1, of=inner)
        return result

"""Axes of arrays as rows of segments: units that move together, and what never moves."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .graph import ArchitectureGraph, Node


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


def scaled(axis: Axis, block: int) -> Axis:
    """Return the axis in which each entry is replaced by so many adjacent ones."""
    return tuple(replace(segment, block=segment.block * block) for segment in axis)


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


class Variables:
    """The units of a graph's axes; ``Segment.group`` is a variable here, and becomes a group's index at the end.

    Attributes:
        merged: Sets of variables that are one; ``merged[variable]`` stands for all of its set.
        pins: Variables that do not move, each with why the model is refused unless it is fixed anyway, or None.
        bound: (Parameter, axis) -> what that axis consists of; tied parameters by their first name.
        written: (Parameter, axis) that makes units -> the parameter's role and its layer's name, in data-flow order.
        read: Axes along which a layer reads.
    """

    def __init__(self, graph: ArchitectureGraph) -> None:
        from scipy.cluster.hierarchy import DisjointSet  # for which clients that read no graph need not wait

        self.graph = graph
        self.merged: DisjointSet[int] = DisjointSet()
        self.pins: list[tuple[int, str | None]] = []
        self.bound: dict[tuple[str, int], Axis] = {}
        self.written: dict[tuple[str, int], tuple[str, str]] = {}
        self.read: list[Axis] = []

    def new(self, width: int) -> Axis:
        """An axis of units that nothing is known about yet."""
        variable = len(self.merged)
        self.merged.add(variable)
        return (Segment(variable, width),)

    def pin(self, axis: Axis, refusal: str | None = None) -> None:
        """Say that an axis does not move; with a refusal, that the model is refused unless it is fixed anyway."""
        self.pins += [(segment.group, refusal) for segment in axis if segment.group is not None]

    def unify(self, one: Axis, other: Axis, node: Node) -> Axis:
        """One axis where two meet; both have the same size."""
        reason = None
        if moving(one) and moving(other):
            if [(s.width, s.block) for s in one] == [(s.width, s.block) for s in other]:
                for mine, yours in zip(one, other, strict=True):
                    if mine.group is None or yours.group is None:
                        self.pin((mine, yours))
                    else:
                        self.merged.merge(mine.group, yours.group)
                return one
            reason = f"{node} joins two axes that are put together differently (a concatenation on one side only?)"
        self.pin(one + other, reason)
        return one

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
            self.written.setdefault(place, (role, name.rpartition(".")[0] or node.module))
        else:
            self.read.append(layout)
        return layout

    def refuse_moving(self, node: Node, axes: Iterable[Axis]) -> None:
        """Refuse the model if one of these axes of a node's input moves."""
        for axis in axes:
            self.pin(
                axis, f"{node} works along an axis of hidden units: reordering or adding units would change its result"
            )

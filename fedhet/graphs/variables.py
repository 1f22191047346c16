"""Variables for the axes of a network while its graph is walked: merged as in union-find, or pinned."""

from collections.abc import Iterable
from dataclasses import dataclass

from .axes import Axis, Segment, moves
from .graph import ArchitectureGraph, Node


@dataclass(frozen=True)
class Use:
    """A layer's reading or writing along one axis of a parameter.

    Attributes:
        parameter: Its ``state_dict`` name (the first, where weights are tied).
        role: What it is to the layer.
        layer: Qualified name of the layer's module.
        axis: The parameter's axis.
        writes: Whether the axis makes units, or reads them.
    """

    parameter: str
    role: str
    layer: str
    axis: int
    writes: bool


class Variables:
    """The units of a graph's axes; ``Segment.group`` is a variable here, and becomes a group's index at the end.

    Attributes:
        graph: What is walked.
        pins: Variables that do not move, each with why the model is refused unless it is fixed anyway (None: merely
            fixed).
        bound: (Parameter, axis) -> what that axis consists of.
        uses: In data-flow order.
    """

    def __init__(self, graph: ArchitectureGraph) -> None:
        self.graph = graph
        self.pins: list[tuple[int, str | None]] = []
        self.bound: dict[tuple[str, int], Axis] = {}
        self.uses: list[Use] = []
        self._parents: list[int] = []

    def new(self, width: int) -> Axis:
        """An axis of units that nothing is known about yet."""
        self._parents.append(len(self._parents))
        return (Segment(len(self._parents) - 1, width),)

    def root(self, variable: int) -> int:
        """The variable that stands for all those merged with this one: the oldest."""
        while self._parents[variable] != variable:
            variable = self._parents[variable]
        return variable

    def pin(self, axis: Axis, refusal: str | None = None) -> None:
        """Say that an axis does not move; with a refusal, that the model is refused unless it is fixed anyway."""
        self.pins += [(segment.group, refusal) for segment in axis if segment.group is not None]

    def unify(self, one: Axis, other: Axis, node: Node) -> Axis:
        """One axis where two meet; both have the same size."""
        if not moves(one) or not moves(other):
            self.pin(one)
            self.pin(other)
            return one
        if [(s.width, s.block) for s in one] != [(s.width, s.block) for s in other]:
            reason = f"{node} joins two axes that are put together differently (a concatenation on one side only?)"
            self.pin(one, reason)
            self.pin(other, reason)
            return one
        for mine, yours in zip(one, other, strict=True):
            if mine.group is None or yours.group is None:
                self.pin((mine, yours))
            else:
                older, younger = sorted((self.root(mine.group), self.root(yours.group)))
                self._parents[younger] = older
        return one

    def bind(self, node: Node, role: str, axis: int, layout: Axis | None, *, writes: bool) -> Axis:
        """Say what an axis of a parameter consists of; None: units of its own. Tied uses are unified."""
        name = node.parameters[role]
        if (name, axis) in self.bound:
            known = self.bound[name, axis]
            layout = known if layout is None else self.unify(known, layout, node)
        elif layout is None:
            layout = self.new(self.graph.shapes[name][axis])
        self.bound.setdefault((name, axis), layout)
        layer = name.rpartition(".")[0] or node.module
        self.uses.append(Use(name, role, layer, axis, writes))
        return layout

    def refuse_moving(self, node: Node, axes: Iterable[Axis]) -> None:
        """Refuse the model if one of these axes of a node's input moves."""
        for axis in axes:
            self.pin(
                axis, f"{node} works along an axis of hidden units: reordering or adding units would change its result"
            )

    def along(self, axis: Axis) -> list[int]:
        """The variables along an axis, each by the one that stands for it."""
        return [self.root(segment.group) for segment in axis if segment.group is not None]

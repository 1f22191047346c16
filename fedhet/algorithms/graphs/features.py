"""The features of values inside a network: the layer that wrote a value, and the axis along which its features lie.

A convolution writes along axis 1, a linear layer, an embedding or a recurrent layer along the last axis. The rules of
operators (`rules`, `layer_rules`) then say where transposes, reshapes and selections move this axis.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor

from fedhet.algorithms.graphs.axes import VALUE, Axis, Value, Variables, entries, fixed, moving
from fedhet.algorithms.graphs.graph import ArchitectureGraph, Node, UnsupportedArchitecture
from fedhet.algorithms.graphs.layer_rules import GATES, Several
from fedhet.algorithms.graphs.permutations import visit

_PRODUCTS = ("matmul", "bmm", "mm", "baddbmm", "addmm")
_ELEMENTWISE = ("add", "sub", "mul", "div")


@dataclass(frozen=True)
class Features:
    """The features of a value: `module` is the last layer that wrote them, `axis` the axis along which they lie."""

    module: str
    axis: int


def features(graph: ArchitectureGraph) -> dict[str, Features]:
    """Return the features of the values in a graph, by the name of the value's node.

    A value is left out if no layer wrote it, or if its features lie along several axes, such as attention's heads.
    """
    marks, values, writers = _Marks(graph), dict[str, Value | Several](), dict[str, str]()
    found: dict[str, Features] = {}
    for node in graph:
        inputs = [values[name] for name in node.inputs]
        value = values[node.name] = _value(marks, node, inputs)
        wrote = [writers[name] for name in node.inputs if name in writers]
        if _writes(node) or wrote:
            writers[node.name] = node.module if _writes(node) else wrote[0]
            axes = [] if isinstance(value, Several) else _marked(value)
            if len(axes) == 1 and axes[0]:
                found[node.name] = Features(writers[node.name], axes[0])
    return found


def output_features(graph: ArchitectureGraph, module: str, shape: Sequence[int] = ()) -> Features:
    """Return the features of a module's output, given the output's shape if it is known.

    Raises:
        UnsupportedArchitecture: the axis of the features is unknown.
    """
    inside = [node for node in graph if node.shape and f"{node.module}.".startswith(f"{module}.")]
    node = next((node for node in reversed(inside) if node.shape[1:] == tuple(shape or node.shape)[1:]), None)
    if node is None or (known := features(graph).get(node.name)) is None:
        size = tuple(shape) or (node.shape if node else "unknown")
        raise UnsupportedArchitecture(
            f"the output of {module!r}, of shape {size}, has no single axis along which a layer wrote features: name a "
            "module that returns the output of a layer, such as a convolution or nn.Linear"
        )
    return known


def channel_means(values: Tensor, axis: int = 1) -> Tensor:
    """Return values (n, ...) averaged over all positions, (n, d); `axis` is the axis of their features."""
    return values.movedim(axis, 1).flatten(2).mean(2) if values.ndim > 2 else values


class _Marks(Variables):
    """Variables without constraints, which mark the axes along which layers wrote features."""

    def __init__(self, graph: ArchitectureGraph) -> None:
        super().__init__(graph, {})

    def pin(self, axis: Axis) -> None:
        pass

    def refuse(self, axes: Iterable[Axis], reason: str) -> None:
        pass

    def hidden(self) -> set[int]:
        return set(range(1, self._count + 1))

    def unify(self, one: Axis, other: Axis, node: Node) -> Axis:
        return one if moving(one) else other

    def together(self, axis: Axis, count: int, node: Node) -> Axis:
        return tuple(replace(segment, width=segment.size // count, block=count) for segment in axis)

    def split(self, axis: Axis, sizes: Sequence[int], node: Node) -> list[Axis]:
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        moves = bool(moving(axis))
        return [self.new(size) if moves and place == largest else fixed(size) for place, size in enumerate(sizes)]

    def part(self, axis: Axis, count: int) -> Axis | None:
        return self.new(entries(axis) // count) if moving(axis) else None

    def bind(self, node: Node, role: str, axis: int, layout: Axis | None, *, writes: bool) -> Axis:
        size = self.graph.shapes[node.parameters[role]][axis] if layout is None else entries(layout)
        if role == VALUE:
            return fixed(size)
        return layout if layout and (moving(layout) or not writes) else self.new(size)


def _value(marks: _Marks, node: Node, inputs: Sequence[Value | Several]) -> Value | Several:
    """Return the axes of a node's result, with units along those that have features."""
    value: Value | Several = tuple(map(fixed, node.shape))
    with suppress(UnsupportedArchitecture):
        value = visit(marks, node, inputs) if node.operator != "expand" else value  # it makes equal entries
    if isinstance(value, Several):
        return value
    whole = [each for each in inputs if not isinstance(each, Several) and len(each) == len(value)]
    known = next((places for each in whole if (places := _marked(each))), [])
    if _writes(node) and not _marked(value):
        known = [1 if node.operator.startswith("conv") else len(node.shape) - 1]
    elif _marked(value) and not (node.operator in _ELEMENTWISE and len(_marked(value)) > 1):
        return value
    return tuple(marks.new(size) if place in known else fixed(size) for place, size in enumerate(node.shape))


def _marked(value: Value) -> list[int]:
    return [place for place, axis in enumerate(value) if moving(axis)]


def _writes(node: Node) -> bool:
    """Return whether an operator is a layer that writes features, or a matrix product."""
    layer = node.operator.startswith("conv") or node.operator in ("linear", "embedding", *GATES)
    return (layer and bool(node.parameters)) or node.operator in _PRODUCTS

"""The features of values inside a network: the axis along which the entries that a layer wrote lie.

A convolution writes along axis 1, a linear layer, an embedding or a recurrent layer along the last axis. Transposes,
reshapes and selections move this axis; other operators keep it.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from torch import Tensor

from fedhet.algorithms.graphs.graph import ArchitectureGraph, Node, UnsupportedArchitecture
from fedhet.algorithms.graphs.layer_rules import GATES
from fedhet.algorithms.graphs.rules import dims_of, order_of

_PRODUCTS = ("matmul", "bmm", "mm", "baddbmm", "addmm")
_LAYERS = ("linear", "embedding", *GATES)


def features(graph: ArchitectureGraph) -> dict[str, int]:
    """Return the axis of the features of the values in a graph, by the name of the value's node.

    A value is left out if no layer wrote it, or if its features lie along no single axis.
    """
    found: dict[str, int] = {}
    for node in graph:
        axis = None
        if node.operator.startswith("conv") and node.parameters:
            axis = 1
        elif node.operator in _PRODUCTS or (node.operator in _LAYERS and node.parameters):
            axis = len(node.shape) - 1
        elif known := next((name for name in node.inputs if name in found), ""):
            axis = _moved(node, graph[known].shape, found[known])
        if axis is not None:
            found[node.name] = axis
    return {name: axis for name, axis in found.items() if axis}  # without features along the batch axis


def _moved(node: Node, shape: tuple[int, ...], axis: int) -> int | None:
    """Return where an operator moves the axis `axis` of its input of this shape, or None if the axis is gone."""
    if node.operator in ("expand", "stack"):
        return None  # equal entries, or an axis in between
    if node.operator in ("transpose", "permute", "t"):
        return order_of(node, len(shape)).index(axis)
    sizes = list(accumulate((1, *shape), mul)), list(accumulate((1, *node.shape), mul))
    reshapes = len(node.shape) != len(shape) or node.operator in ("view", "reshape", "_unsafe_view")
    if reshapes and sizes[0][-1] == sizes[1][-1]:
        return _reshaped(sizes[0][axis], sizes[0][axis + 1], sizes[1])
    if len(node.shape) < len(shape):
        removed = dims_of(node, len(shape))
        return None if axis in removed else axis - sum(dim < axis for dim in removed)
    return axis + len(node.shape) - len(shape)


def _reshaped(start: int, end: int, ends: Sequence[int]) -> int | None:
    """Return the new axis that covers the old one from `start` to `end`, or the largest of its parts."""
    axes = range(len(ends) - 1)
    covering = [axis for axis in axes if ends[axis] <= start and end <= ends[axis + 1] and ends[axis] < ends[axis + 1]]
    parts = [axis for axis in axes if start <= ends[axis] < ends[axis + 1] <= end]
    return next(iter(covering), max(parts, key=lambda axis: ends[axis + 1] // ends[axis], default=None))


def output_axis(graph: ArchitectureGraph, module: str, shape: Sequence[int] = ()) -> int:
    """Return the axis of the features of a module's output, given the output's shape if it is known.

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

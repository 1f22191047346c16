"""Rules of operators, which derive the axes of results from the axes of inputs (for layers, see `layer_rules`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from typing import TypeVar

from torch import Tensor

from fedhet.algorithms.graphs.axes import VALUE, Axis, Value, Variables, entries, fixed, joined, scaled
from fedhet.algorithms.graphs.graph import ArchitectureGraph, Node, UnsupportedArchitecture

# fmt: off
_POOLING = (
    "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "upsample_nearest1d", "upsample_nearest2d", "upsample_linear1d",
    "upsample_bilinear2d",
)
_RESHAPES = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")
_ACTIVATIONS = (
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "sigmoid", "log_sigmoid",
    "tanh", "hardtanh", "hardswish", "hardsigmoid", "clamp", "abs", "square", "threshold",
)
_IDENTITIES = (
    "dropout", "feature_dropout", "alpha_dropout", "contiguous", "clone", "detach", "alias", "to", "lift_fresh_copy",
    "masked_fill", "where",
)
# fmt: on


@dataclass(frozen=True)
class Several:
    """Several results of an operator, such as the final states of an LSTM's layers; a later node selects one."""

    values: tuple["Value | Several", ...]


RULES: dict[str, Callable[..., Value | Several]] = {}

R = TypeVar("R", bound=Callable[..., Value | Several])


def rule(*operators: str) -> Callable[[R], R]:
    """Return a decorator that registers a function as the rule of these operators."""

    def register(function: R) -> R:
        RULES.update(dict.fromkeys(operators, function))
        return function

    return register


@rule("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
def _source(variables: Variables, node: Node, *values: Value) -> Value:
    return tuple(map(fixed, node.shape))


@rule("parameter")
def _parameter(variables: Variables, node: Node) -> Value:
    return tuple(
        variables.bind(node, VALUE, axis, None if size > 1 else fixed(1), writes=True)
        for axis, size in enumerate(node.shape)
    )


@rule(*_ACTIVATIONS, *_IDENTITIES, "add", "sub", "rsub", "mul", "div")
def _elementwise(variables: Variables, node: Node, *values: Value) -> Value:
    if node.operator == "div" and len(values) > 1:
        variables.refuse(values[-1], f"{node} divides by hidden units: units added to a wider model would give 0/0")
    return broadcast_all(variables, node, *values)


def broadcast_all(variables: Variables, node: Node, *values: Value) -> Value:
    """Return the axes of the result of broadcasting values."""
    rank = max(map(len, values))
    aligned = [(fixed(1),) * (rank - len(value)) + value for value in values]
    return tuple(reduce(partial(_broadcast, variables, node), axes) for axes in zip(*aligned, strict=True))


def _broadcast(variables: Variables, node: Node, one: Axis, other: Axis) -> Axis:
    if entries(one) == entries(other):
        return variables.unify(one, other, node)
    small, large = sorted((one, other), key=entries)
    variables.pin(small)  # an entry that is broadcast must stay one entry
    return large


@rule(*_POOLING, "mean", "sum", "amax", "softmax", "log_softmax", "flip", "roll", "select", "slice")
def _along(variables: Variables, node: Node, value: Value) -> Value:
    """Return the axes of the result of an operator that works along axes without hidden units, such as a mean."""
    if node.operator in _POOLING:
        dims = list(range(len(value) - int(node.operator[-2]), len(value)))
    else:
        dims = dims_of(node, len(value))
    if node.operator == "slice" and node.shape == tuple(map(entries, value)):
        return value
    variables.refuse_moving(node, [value[dim] for dim in dims])
    if len(node.shape) < len(value):
        return tuple(axis for dim, axis in enumerate(value) if dim not in dims)
    sizes = enumerate(zip(value, node.shape, strict=True))
    return tuple(fixed(size) if dim in dims and entries(axis) != size else axis for dim, (axis, size) in sizes)


@rule(*_RESHAPES)
def _reshape(variables: Variables, node: Node, value: Value) -> Value:
    """Return the axes of a reshaped value: an old axis is divided where a new one ends, and the parts are joined."""
    sizes = tuple(map(entries, value))
    refusal = f"{node} reshapes an axis of hidden units apart: {sizes} to {node.shape}"
    ends = sorted({1, *accumulate(sizes, mul), *accumulate(node.shape, mul)})
    if any(after % before for before, after in pairwise(ends)):
        variables.refuse(value, refusal)
        return tuple(map(fixed, node.shape))
    parts: list[Axis] = []
    start = 1
    for axis in value:
        end = start * entries(axis)
        within = [after // before for before, after in pairwise(ends) if start <= before < end]
        parts += [axis] if len(within) < 2 else variables.split(axis, within, node)
        start = end
    result = []
    for size in node.shape:
        taken: list[Axis] = []
        while parts and (not taken or prod(map(entries, taken)) < size) and entries(parts[0]) <= size:
            taken.append(parts.pop(0))
        result.append(_together(variables, taken, refusal))
    for axis in parts:  # axes of one entry, which the reshape drops
        variables.pin(axis)
    return tuple(result)


def _together(variables: Variables, axes: Sequence[Axis], refusal: str) -> Axis:
    """Flatten axes to one axis. At most one can have hidden units; `refusal` is the message of the error otherwise."""
    sizes = [entries(axis) for axis in axes]
    places = [place for place, axis in enumerate(axes) if variables.moves(axis)]
    if len(places) == 1:
        place = places[0]
        return scaled(axes[place], prod(sizes[place + 1 :])) * prod(sizes[:place])
    variables.refuse(axes, refusal)
    return fixed(prod(sizes))


@rule("transpose", "permute", "t")
def _transpose(variables: Variables, node: Node, value: Value) -> Value:
    return tuple(value[dim] for dim in order_of(node, len(value)))


def order_of(node: Node, rank: int) -> list[int]:
    """Return, for each axis of the result of a transpose, the corresponding axis of its input of `rank` axes."""
    order = list(range(rank))
    if node.operator == "permute":
        return [dim % rank for dim in node.options["dims"]]
    if rank > 1:
        one, other = (node.options.get(key, default) for key, default in (("dim0", 0), ("dim1", 1)))
        order[one], order[other] = order[other], order[one]
    return order


@rule("squeeze")
def _squeeze(variables: Variables, node: Node, value: Value) -> Value:
    dims = [dim for dim in dims_of(node, len(value)) if entries(value[dim]) == 1]
    for dim in dims:
        variables.pin(value[dim])
    return tuple(axis for dim, axis in enumerate(value) if dim not in dims)


@rule("unsqueeze")
def _unsqueeze(variables: Variables, node: Node, value: Value) -> Value:
    dim = node.options["dim"] % (len(value) + 1)
    return (*value[:dim], fixed(1), *value[dim:])


@rule("expand")
def _expand(variables: Variables, node: Node, value: Value) -> Value:
    """Return the axes of an expanded value. Entries along an expanded axis are equal, so they can be permuted."""
    value = (fixed(1),) * (len(node.shape) - len(value)) + value
    for axis, size in zip(value, node.shape, strict=True):
        if entries(axis) != size:
            variables.pin(axis)
    sizes = zip(value, node.shape, strict=True)
    return tuple(axis if entries(axis) == size else variables.new(size) for axis, size in sizes)


@rule("pad")
def _pad(variables: Variables, node: Node, value: Value) -> Value:
    padded = len(value) - len(node.options["pad"]) // 2
    variables.refuse_moving(node, [axis for axis, size in zip(value, node.shape, strict=True) if entries(axis) != size])
    return (*value[:padded], *map(fixed, node.shape[padded:]))


@rule("cat")
def _cat(variables: Variables, node: Node, *values: Value) -> Value:
    dim = node.options.get("dim", 0) % len(node.shape)
    values = tuple(value for value in values if len(value) > 1 or entries(value[0]))  # empty tensors are left out
    result = list(values[0])
    for other in values[1:]:
        result = [
            a if d == dim else variables.unify(a, b, node) for d, (a, b) in enumerate(zip(result, other, strict=True))
        ]
    result[dim] = joined(*(value[dim] for value in values))
    return tuple(result)


@rule("chunk", "split", "split_with_sizes", "glu")
def _parts(variables: Variables, node: Node, value: Value) -> Value | Several:
    """Return the axes of the parts of a divided value. Equal parts have the same hidden units, as in a GLU."""
    dim = node.options["dim"] % len(value)
    count, rest = divmod(entries(value[dim]), node.shape[dim])
    sizes = node.options.get("split_sizes", [node.shape[dim]] * count + [rest] * (rest > 0))
    part = variables.part(value[dim], count) if len({*sizes}) == 1 else None
    if part is None:
        variables.refuse_moving(node, [value[dim]])
    parts = tuple((*value[:dim], part or fixed(size), *value[dim + 1 :]) for size in sizes)
    return parts[0] if node.operator == "glu" else Several(parts)


@rule("unbind")
def _unbind(variables: Variables, node: Node, value: Value) -> Several:
    """Return the axes of the results of `unbind`; the axis that it removes must not have hidden units."""
    dim = node.options["dim"] % len(value)
    variables.refuse_moving(node, [value[dim]])
    return Several(((*value[:dim], *value[dim + 1 :]),) * entries(value[dim]))


def dims_of(node: Node, rank: int) -> list[int]:
    """Return the axes along which an operator works, given the number of axes of its input (`rank`)."""
    dims = node.options.get("dim", node.options.get("dims"))
    dims = range(rank) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    return [dim % rank for dim in dims]


# ---- the axis of features: a convolution writes along axis 1, a linear or recurrent layer along the last axis

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Recurrent layer -> number of gates, whose rows are stacked in its weights."""

_PRODUCTS = ("matmul", "bmm", "mm", "baddbmm", "addmm")
_LAYERS = ("linear", "embedding", *GATES)


def features(graph: ArchitectureGraph) -> dict[str, int]:
    """Return the axis of the features of the values in a graph, by the name of the value's node.

    Values without a layer before them, and values whose features lie along several axes, are left out.
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
    """Return the axis of an operator's result that corresponds to `axis` of its input; None if there is none."""
    if node.operator in ("expand", "stack"):
        return None  # equal entries, or an axis in between
    if node.operator in ("transpose", "permute", "t"):
        return order_of(node, len(shape)).index(axis)
    if prod(shape) == prod(node.shape) and (len(node.shape) != len(shape) or node.operator in _RESHAPES):
        start, end, *_ = list(accumulate((1, *shape), mul))[axis:]
        ends = list(pairwise(accumulate((1, *node.shape), mul)))
        covering = [
            new for new, (before, after) in enumerate(ends) if before < after and before <= start and end <= after
        ]
        parts = [new for new, (before, after) in enumerate(ends) if start <= before < after <= end]
        return next(iter(covering), max(parts, key=lambda new: node.shape[new], default=None))
    if len(node.shape) < len(shape):
        removed = dims_of(node, len(shape))
        return None if axis in removed else axis - sum(dim < axis for dim in removed)
    return axis + len(node.shape) - len(shape)


def output_axis(graph: ArchitectureGraph, module: str, shape: Sequence[int] = ()) -> int:
    """Return the axis of the features of a module's output, given the output's shape if it is known.

    Raises an UnsupportedArchitecture error if the axis is unknown.
    """
    inside = [node for node in graph if node.shape and f"{node.module}.".startswith(f"{module}.")]
    node = next((node for node in reversed(inside) if node.shape[1:] == tuple(shape or node.shape)[1:]), None)
    if node is None or (known := features(graph).get(node.name)) is None:
        raise UnsupportedArchitecture(
            f"the output of {module!r} has no single axis of features: name a layer (nn.Linear)"
        )
    return known


def channel_means(values: Tensor, axis: int = 1) -> Tensor:
    """Return the means (n, d) of values (n, ...) over all positions; `axis` is the axis of the d features."""
    return values.movedim(axis, 1).flatten(2).mean(2) if values.ndim > 2 else values.clone()

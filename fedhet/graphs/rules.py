"""How each operator passes the axes of its inputs on.

A rule takes the variables, the node and the axes of its inputs, and returns those of its result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import prod
from typing import TypeVar

from .axes import Axis, Value, Variables, entries, fixed, joined, moving, scaled
from .graph import Node, UnsupportedArchitecture

# fmt: off
_POOLING = (
    "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "upsample_nearest1d", "upsample_nearest2d", "upsample_linear1d",
    "upsample_bilinear2d",
)
_ACTIVATIONS = (
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "sigmoid", "log_sigmoid",
    "tanh", "hardtanh", "hardswish", "hardsigmoid", "clamp", "abs", "square", "threshold",
)
_IDENTITIES = (
    "dropout", "feature_dropout", "alpha_dropout", "contiguous", "clone", "detach", "alias", "to", "lift_fresh_copy",
)
# fmt: on


@dataclass(frozen=True)
class Several:
    """Values of which a later node takes one: several results, or an LSTM's final states, layer by layer."""

    values: tuple["Value | Several", ...]


RULES: dict[str, Callable[..., Value | Several]] = {}

R = TypeVar("R", bound=Callable[..., Value | Several])


def _rule(*operators: str) -> Callable[[R], R]:
    """Register the rule of these operators."""

    def register(function: R) -> R:
        RULES.update(dict.fromkeys(operators, function))
        return function

    return register


@_rule("input", "constant", "zeros", "ones", "full", "arange", "zeros_like", "ones_like", "new_zeros", "new_ones")
def _source(variables: Variables, node: Node, *values: Value) -> Value:
    return tuple(map(fixed, node.shape))


@_rule("parameter")
def _outside(variables: Variables, node: Node) -> Value:
    """A parameter that no layer rule knows: whatever it meets may not move, and hidden units must."""
    refusal = f"parameter {node.parameters['value']} is used outside of a supported layer; fedhet cannot permute it"
    value = tuple(variables.new(size) if size > 1 else fixed(1) for size in node.shape)
    for axis in value:
        variables.pin(axis, refusal)
    return value


@_rule(*_ACTIVATIONS, *_IDENTITIES, "add", "sub", "rsub", "mul", "div")
def _elementwise(variables: Variables, node: Node, *values: Value) -> Value:
    if node.operator == "div" and moving(*values[-1]) and len(values) > 1:
        raise UnsupportedArchitecture(f"{node} divides by hidden units: units added to a wider model would give 0/0")
    rank = max(map(len, values))
    aligned = [(fixed(1),) * (rank - len(value)) + value for value in values]
    return tuple(reduce(partial(_broadcast, variables, node), axes) for axes in zip(*aligned, strict=True))


def _broadcast(variables: Variables, node: Node, one: Axis, other: Axis) -> Axis:
    if entries(one) == entries(other):
        return variables.unify(one, other, node)
    small, large = sorted((one, other), key=entries)
    variables.pin(small)  # one unit that all others take must stay one unit
    return large


@_rule(*_POOLING, "mean", "sum", "amax", "softmax", "log_softmax", "flip", "select", "slice")
def _along(variables: Variables, node: Node, value: Value) -> Value:
    """The axes that an operator works along must not move; along the others it is done for each unit alike."""
    if node.operator in _POOLING:
        dims = list(range(len(value) - int(node.operator[-2]), len(value)))
    else:
        dims = _dims(node, len(value))
    if node.operator == "slice" and node.shape == tuple(map(entries, value)):
        return value
    variables.refuse_moving(node, [value[dim] for dim in dims])
    if len(node.shape) < len(value):
        return tuple(axis for dim, axis in enumerate(value) if dim not in dims)
    sizes = enumerate(zip(value, node.shape, strict=True))
    return tuple(fixed(size) if dim in dims and entries(axis) != size else axis for dim, (axis, size) in sizes)


@_rule("view", "reshape", "_unsafe_view", "flatten", "unflatten")
def _reshape(variables: Variables, node: Node, value: Value) -> Value:
    """Split both shapes into the smallest runs of equal products; an axis moves only within its run."""
    result: list[Axis] = []
    old, new = 0, 0
    while old < len(value) or new < len(node.shape):
        start = old, new
        old, new = min(old + 1, len(value)), min(new + 1, len(node.shape))
        while (before := prod(map(entries, value[start[0] : old]))) != (after := prod(node.shape[start[1] : new])):
            old, new = old + (before < after), new + (before > after)
        result += _regroup(variables, node, value[start[0] : old], node.shape[start[1] : new])
    return tuple(result)


def _regroup(variables: Variables, node: Node, old: Value, sizes: Sequence[int]) -> list[Axis]:
    result = list(map(fixed, sizes))
    indices = [index for index, axis in enumerate(old) if moving(axis)]
    if not indices:
        return result
    refusal = f"{node} reshapes an axis of hidden units apart; only (N, C, ...) -> (N, C*...) and back are known"
    places = [index for index, size in enumerate(sizes) if size > 1] or list(range(len(sizes)))[:1]
    axis = old[indices[0]]
    if len(indices) == 1 and len(places) == 1:
        before, after = (prod(map(entries, part)) for part in (old[: indices[0]], old[indices[0] + 1 :]))
        result[places[0]] = scaled(axis, after) * before
    elif not places:  # one unit whose axis is dropped
        variables.pin(axis)
    elif len(axis) == 1 and prod(sizes) == axis[0].size and sizes[places[0]] % axis[0].width == 0:
        result[places[0]] = (replace(axis[0], block=sizes[places[0]] // axis[0].width),)
    else:
        for index in indices:
            variables.pin(old[index], refusal)
    return result


@_rule("transpose", "permute", "t")
def _transpose(variables: Variables, node: Node, value: Value) -> Value:
    order = list(range(len(value)))
    if node.operator == "permute":
        order = [dim % len(value) for dim in node.options["dims"]]
    elif len(value) > 1:
        one, other = (node.options.get(key, default) for key, default in (("dim0", 0), ("dim1", 1)))
        order[one], order[other] = order[other], order[one]
    return tuple(value[dim] for dim in order)


@_rule("squeeze")
def _squeeze(variables: Variables, node: Node, value: Value) -> Value:
    dims = [dim for dim in _dims(node, len(value)) if entries(value[dim]) == 1]
    for dim in dims:
        variables.pin(value[dim])
    return tuple(axis for dim, axis in enumerate(value) if dim not in dims)


@_rule("unsqueeze")
def _unsqueeze(variables: Variables, node: Node, value: Value) -> Value:
    dim = node.options["dim"] % (len(value) + 1)
    return (*value[:dim], fixed(1), *value[dim:])


@_rule("expand")
def _expand(variables: Variables, node: Node, value: Value) -> Value:
    value = (fixed(1),) * (len(node.shape) - len(value)) + value
    grown = [axis for axis, size in zip(value, node.shape, strict=True) if entries(axis) != size]
    for axis in grown:
        variables.pin(axis)
    return tuple(axis if entries(axis) == size else fixed(size) for axis, size in zip(value, node.shape, strict=True))


@_rule("pad")
def _pad(variables: Variables, node: Node, value: Value) -> Value:
    result, pairs = list(value), node.options["pad"]
    for index in range(0, len(pairs), 2):
        dim, (left, right) = len(value) - 1 - index // 2, pairs[index : index + 2]
        if not moving(value[dim]):
            result[dim] = fixed(node.shape[dim])
        elif left or right:
            if node.options.get("mode", "constant") != "constant" or left < 0 or right < 0:
                variables.refuse_moving(node, [value[dim]])
            result[dim] = joined(fixed(left), value[dim], fixed(right))
    return tuple(result)


@_rule("cat")
def _cat(variables: Variables, node: Node, *values: Value) -> Value:
    dim = node.options.get("dim", 0) % len(node.shape)
    result = list(values[0])
    for other in values[1:]:
        result = [
            a if d == dim else variables.unify(a, b, node) for d, (a, b) in enumerate(zip(result, other, strict=True))
        ]
    result[dim] = joined(*(value[dim] for value in values))
    return tuple(result)


@_rule("linear")
def _linear(variables: Variables, node: Node, value: Value) -> Value:
    variables.bind(node, "weight", 1, value[-1], writes=False)
    return (*value[:-1], _written(variables, node))


def _written(variables: Variables, node: Node, layout: Axis | None = None) -> Axis:
    """The axis that a layer's output rows make."""
    layout = variables.bind(node, "weight", 0, layout, writes=True)
    if "bias" in node.parameters:
        variables.bind(node, "bias", 0, layout, writes=True)
    return layout


@_rule("conv1d", "conv2d")
def _convolution(variables: Variables, node: Node, value: Value) -> Value:
    weight = variables.graph.shapes[node.parameters["weight"]]
    if len(value) != len(weight):
        raise UnsupportedArchitecture(f"{node} takes an input without batch axis; the example must be a batch")
    groups, channels = node.options["groups"], entries(value[1])
    variables.refuse_moving(node, value[2:])
    if groups == 1:
        variables.bind(node, "weight", 1, value[1], writes=False)
        written = _written(variables, node)
    elif groups == channels:  # depthwise: a channel's filters belong to the channel's unit
        written = _written(variables, node, scaled(value[1], weight[0] // channels))
    else:
        raise UnsupportedArchitecture(
            f"{node} is a grouped convolution ({groups} groups of {channels // groups} channels): its channels "
            "cannot be reordered freely; use groups=1 or a depthwise convolution (groups=in_channels)"
        )
    return (value[0], written, *map(fixed, node.shape[2:]))


@_rule("batch_norm", "prelu")
def _channelwise(variables: Variables, node: Node, value: Value) -> Value:
    """BatchNorm and PReLU: a number a channel, which belongs to the channel's unit."""
    for role, name in node.parameters.items():
        one_for_all = variables.graph.shapes[name] != (entries(value[1]),)  # PReLU with one slope
        variables.bind(node, role, 0, fixed(1) if one_for_all else value[1], writes=True)
    return value


@_rule("embedding")
def _embedding(variables: Variables, node: Node, value: Value) -> Value:
    variables.bind(node, "weight", 0, fixed(variables.graph.shapes[node.parameters["weight"]][0]), writes=False)
    return (*value, variables.bind(node, "weight", 1, None, writes=True))


@_rule("lstm")
def _lstm(variables: Variables, node: Node, value: Value, *states: Value) -> Several:
    if "batch_first" not in node.options:
        raise UnsupportedArchitecture(f"{node} runs over packed sequences, which fedhet cannot permute; pad them")
    if "weight_hr_l0" in node.parameters:
        raise UnsupportedArchitecture(f"{node} has projections, which fedhet cannot permute; build it with proj_size=0")
    for name in node.inputs[1:]:
        if variables.graph[name].operator not in ("zeros", "zeros_like", "new_zeros"):
            raise UnsupportedArchitecture(
                f"{node} starts from a state that is computed; fedhet knows only a start at 0"
            )
    axis, hidden = value[-1], []
    for layer in range(node.options["num_layers"]):
        directions = []
        for suffix in ("", "_reverse") if node.options["bidirectional"] else ("",):
            name = f"l{layer}{suffix}"
            variables.bind(node, f"weight_ih_{name}", 1, axis, writes=False)
            units = variables.bind(node, f"weight_hh_{name}", 1, None, writes=False)
            for role in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                if f"{role}_{name}" in node.parameters:
                    variables.bind(node, f"{role}_{name}", 0, units * 4, writes=True)  # the gates i, f, g, o
            directions.append(units)
        hidden += directions
        axis = joined(*directions)
    batch = value[0] if node.options["batch_first"] else value[1]
    finals = tuple((batch, units) for units in hidden)
    final = Several(finals) if len(finals) > 1 else (fixed(1), *finals[0])
    return Several(((*value[:-1], axis), final, final))


def _dims(node: Node, rank: int) -> list[int]:
    """The axes that an operator's options name; all of them, if they name none."""
    dims = node.options.get("dim", node.options.get("dims"))
    dims = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims
    return [dim % rank for dim in dims]

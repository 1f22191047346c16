"""Rules of operators: functions that find which hidden units lie along a result's axes, given those of the inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate, pairwise
from math import prod
from operator import mul

from fedhet.algorithms.graphs.axes import VALUE, Axis, Value, Variables, entries, fixed, joined, scaled
from fedhet.algorithms.graphs.graph import Node, UnsupportedArchitecture

# fmt: off
_POOLING = (
    "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "upsample_nearest1d", "upsample_nearest2d", "upsample_linear1d",
    "upsample_bilinear2d",
)
RESHAPES = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")
_ACTIVATIONS = (
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "sigmoid", "log_sigmoid",
    "tanh", "hardtanh", "hardswish", "hardsigmoid", "clamp", "abs", "square", "threshold", "where",
)
_IDENTITIES = (
    "dropout", "feature_dropout", "alpha_dropout", "contiguous", "clone", "detach", "alias", "to", "masked_fill",
)
# fmt: on


@dataclass(frozen=True)
class Several:
    """Several results of an operator, such as the final states of an LSTM's layers; a later node selects one."""

    values: tuple["Value | Several", ...]


Rule = Callable[..., Value | Several]

RULES: dict[str, Rule] = {}


def rule(*operators: str) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a function as the rule of these operators (ATen names)."""

    def register(function: Rule) -> Rule:
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
    """Return the axes of the result of `node`, an elementwise operator on tensors with the axes `values`.

    The axes are aligned as in broadcasting. `variables` records that hidden units along aligned axes must be permuted
    alike, and that an entry which is broadcast is never permuted.
    """
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
    rank = len(value)
    dims = range(rank - int(node.operator[-2]), rank) if node.operator in _POOLING else dims_of(node, rank)
    if node.operator == "slice" and node.shape == tuple(map(entries, value)):
        return value
    variables.refuse_moving(node, [value[dim] for dim in dims])
    if len(node.shape) < rank:
        return tuple(axis for dim, axis in enumerate(value) if dim not in dims)
    sizes = enumerate(zip(value, node.shape, strict=True))
    return tuple(fixed(size) if dim in dims and entries(axis) != size else axis for dim, (axis, size) in sizes)


@rule(*RESHAPES)
def _reshape(variables: Variables, node: Node, value: Value) -> Value:
    # Old axes are divided where new ones end, and the parts are joined.
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
    # Flattens axes, at most one of which can have hidden units.
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
    """Return, for each axis of a transpose's result, the corresponding axis of its input, which has `rank` axes."""
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
    # An expanded axis, whose entries are all equal, is a new variable.
    value = (fixed(1),) * (len(node.shape) - len(value)) + value
    sizes = zip(value, node.shape, strict=True)
    return tuple(axis if entries(axis) == size else variables.new(size) for axis, size in sizes)


@rule("pad")
def _pad(variables: Variables, node: Node, value: Value) -> Value:
    pads = node.options["pad"]  # before and after each axis, from the last axis on
    padded = {len(value) - 1 - place // 2 for place, count in enumerate(pads) if count}
    variables.refuse_moving(node, [value[dim] for dim in padded])
    return tuple(fixed(node.shape[dim]) if dim in padded else axis for dim, axis in enumerate(value))


@rule("cat")
def _cat(variables: Variables, node: Node, *values: Value) -> Value:
    dim = node.options.get("dim", 0) % len(node.shape)
    values = tuple(value for value in values if len(value) > 1 or entries(value[0]))  # empty tensors are left out
    result = list(values[0])
    for other in values[1:]:
        pairs = enumerate(zip(result, other, strict=True))
        result = [a if d == dim else variables.unify(a, b, node) for d, (a, b) in pairs]
    result[dim] = joined(*(value[dim] for value in values))
    return tuple(result)


@rule("chunk", "split", "split_with_sizes", "glu")
def _parts(variables: Variables, node: Node, value: Value) -> Value | Several:
    # Equal parts have the same hidden units, as in a GLU.
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
    dim = node.options["dim"] % len(value)
    variables.refuse_moving(node, [value[dim]])
    return Several(((*value[:dim], *value[dim + 1 :]),) * entries(value[dim]))


def dims_of(node: Node, rank: int) -> list[int]:
    """Return the axes along which the operator `node` works, given the number of axes of its input (`rank`)."""
    dims = node.options.get("dim", node.options.get("dims"))
    dims = range(rank) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    return [dim % rank for dim in dims]


GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Number of gates, whose rows are stacked in the weights, by ATen name of a recurrent layer."""


@rule("linear")
def _linear(variables: Variables, node: Node, value: Value) -> Value:
    variables.bind(node, "weight", 1, value[-1], writes=False)
    return (*value[:-1], _written(variables, node))


def _written(variables: Variables, node: Node, layout: Axis | None = None) -> Axis:
    layout = variables.bind(node, "weight", 0, layout, writes=True)
    if "bias" in node.parameters:
        variables.bind(node, "bias", 0, layout, writes=True)
    return layout


@rule("conv1d", "conv2d")
def _convolution(variables: Variables, node: Node, value: Value) -> Value:
    # A unit is a filter or, with several groups, a group of filters.
    weight = variables.graph.shapes[node.parameters["weight"]]
    groups = node.options["groups"]
    channels = entries(value[1])
    variables.refuse_moving(node, value[2:])
    if groups == 1:
        variables.bind(node, "weight", 1, value[1], writes=False)
        written = _written(variables, node)
    else:  # a group's filters belong to its channels, which stay together; depthwise, to each channel
        count = channels // groups
        together = variables.together(value[1], count, node)
        written = _written(variables, node, scaled(together, weight[0] // groups, of=count))
    return (value[0], written, *map(fixed, node.shape[2:]))


@rule("batch_norm", "prelu")
def _channelwise(variables: Variables, node: Node, value: Value) -> Value:
    for role, name in node.parameters.items():
        one_for_all = variables.graph.shapes[name] != (entries(value[1]),)  # PReLU with one slope
        variables.bind(node, role, 0, fixed(1) if one_for_all else value[1], writes=True)
    return value


@rule("layer_norm", "rms_norm", "group_norm")
def _norm(variables: Variables, node: Node, value: Value) -> Value:
    # In a GroupNorm, each group of channels is one hidden unit.
    groups = node.options.get("num_groups", 0)
    axes = value[1:2] if groups else value[len(value) - len(node.options["normalized_shape"]) :]
    if not node.parameters:
        variables.refuse(axes, f"{node} has no weights that would show its width: build it with weights")
    if groups > 1:
        axes = (variables.together(axes[0], entries(axes[0]) // groups, node),)
    for role in node.parameters:
        for number, axis in enumerate(axes):
            variables.bind(node, role, number, axis, writes=True)
    return (value[0], *axes, *value[2:]) if groups else value


@rule("embedding")
def _embedding(variables: Variables, node: Node, value: Value) -> Value:
    variables.bind(node, "weight", 0, fixed(variables.graph.shapes[node.parameters["weight"]][0]), writes=False)
    return (*value, variables.bind(node, "weight", 1, None, writes=True))


@rule("scaled_dot_product_attention")
def _attention(variables: Variables, node: Node, query: Value, key: Value, value: Value, *mask: Value) -> Value:
    # A hidden unit is an attention head.
    variables.refuse_moving(node, [query[-2], key[-2], value[-2]])
    scores = _product(variables, node, query, (*key[:-2], key[-1], key[-2]))
    for each in mask:
        scores = broadcast_all(variables, node, scores, each)
    return _product(variables, node, scores, value)


@rule("matmul", "bmm", "mm", "baddbmm")
def _matrices(variables: Variables, node: Node, *values: Value) -> Value:
    # Both factors have the same units along the axis that is summed over.
    *others, one, other = values
    return broadcast_all(variables, node, _product(variables, node, one, other), *others)


def _product(variables: Variables, node: Node, one: Value, other: Value) -> Value:
    if len(one) < 2 or len(other) < 2:
        raise UnsupportedArchitecture(f"operator {node} multiplies a vector: make it a matrix by unsqueeze(-1)")
    if prod(map(entries, one[:-2])) > variables.batch:
        variables.refuse_moving(node, [*one[-2:], *other[-2:]])
    variables.read.append(variables.unify(one[-1], other[-2], node))
    return (*broadcast_all(variables, node, one[:-2], other[:-2]), one[-2], other[-1])


@rule(*GATES)
def _recurrent(variables: Variables, node: Node, value: Value, *states: Value) -> Several:
    if "batch_first" not in node.options:
        raise UnsupportedArchitecture(f"packed sequences, which {node} takes, are not supported: use padded tensors")
    if "weight_hr_l0" in node.parameters:
        raise UnsupportedArchitecture(f"LSTM {node} has projections, which are not supported: set its proj_size to 0")
    if not all(variables.graph[name].operator.removeprefix("new_").startswith("zeros") for name in node.inputs[1:]):
        raise UnsupportedArchitecture(
            f"an initial state that the network computes, as for {node}, is not supported: leave the state out (zeros)"
        )
    axis = value[-1]
    hidden = []
    for layer in range(node.options["num_layers"]):
        directions = []
        for suffix in ("", "_reverse") if node.options["bidirectional"] else ("",):
            name = f"l{layer}{suffix}"
            variables.bind(node, f"weight_ih_{name}", 1, axis, writes=False)
            units = variables.bind(node, f"weight_hh_{name}", 1, None, writes=False)
            for role in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                if f"{role}_{name}" in node.parameters:
                    variables.bind(node, f"{role}_{name}", 0, units * GATES[node.operator], writes=True)
            directions.append(units)
        hidden += directions
        axis = joined(*directions)
    batch = value[0] if node.options["batch_first"] else value[1]
    finals = tuple((batch, units) for units in hidden)
    final = Several(finals) if len(finals) > 1 else (fixed(1), *finals[0])
    return Several(((*value[:-1], axis), *(final,) * (1 + (node.operator == "lstm"))))

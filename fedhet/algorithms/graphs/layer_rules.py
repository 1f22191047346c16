"""Rules of layers, which derive the axes of parameters and results from the axes of inputs (see `rules`)."""

from math import prod

from fedhet.algorithms.graphs.axes import Axis, Value, Variables, entries, fixed, joined, scaled
from fedhet.algorithms.graphs.graph import Node, UnsupportedArchitecture
from fedhet.algorithms.graphs.rules import GATES, broadcast_all, rule
from fedhet.algorithms.graphs.rules import RULES as RULES
from fedhet.algorithms.graphs.rules import Several as Several


@rule("linear")
def _linear(variables: Variables, node: Node, value: Value) -> Value:
    variables.bind(node, "weight", 1, value[-1], writes=False)
    return (*value[:-1], _written(variables, node))


def _written(variables: Variables, node: Node, layout: Axis | None = None) -> Axis:
    """Return the axis of a layer's outputs, which is the first axis of its weight and of its bias."""
    layout = variables.bind(node, "weight", 0, layout, writes=True)
    if "bias" in node.parameters:
        variables.bind(node, "bias", 0, layout, writes=True)
    return layout


@rule("conv1d", "conv2d")
def _convolution(variables: Variables, node: Node, value: Value) -> Value:
    """Return the axes of a convolution's result. A unit is a filter or, with several groups, a group of filters."""
    weight = variables.graph.shapes[node.parameters["weight"]]
    groups, channels = node.options["groups"], entries(value[1])
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
    """Return the input's axes; BatchNorm's or PReLU's parameters belong to the hidden units of their channels."""
    for role, name in node.parameters.items():
        one_for_all = variables.graph.shapes[name] != (entries(value[1]),)  # PReLU with one slope
        variables.bind(node, role, 0, fixed(1) if one_for_all else value[1], writes=True)
    return value


@rule("layer_norm", "rms_norm")
def _layer_norm(variables: Variables, node: Node, value: Value) -> Value:
    """Return the input's axes; LayerNorm's or RMSNorm's parameters belong to the hidden units of the last axes."""
    last = value[len(value) - len(node.options["normalized_shape"]) :]
    if not node.parameters:
        variables.refuse(last, f"{node} has no weights that would show its width: set elementwise_affine=True")
    for role in node.parameters:
        for number, axis in enumerate(last):
            variables.bind(node, role, number, axis, writes=True)
    return value


@rule("group_norm")
def _group_norm(variables: Variables, node: Node, value: Value) -> Value:
    """Return the axes of the result, with each of several groups of channels as one hidden unit."""
    axis, groups = value[1], node.options["num_groups"]
    variables.refuse_moving(node, value[2:])
    if not node.parameters:
        variables.refuse([axis], f"{node} has no weights that would show its width; build it with affine=True")
    if groups > 1:
        axis = variables.together(axis, entries(axis) // groups, node)
    for role in node.parameters:
        variables.bind(node, role, 0, axis, writes=True)
    return (value[0], axis, *value[2:])


@rule("embedding")
def _embedding(variables: Variables, node: Node, value: Value) -> Value:
    variables.bind(node, "weight", 0, fixed(variables.graph.shapes[node.parameters["weight"]][0]), writes=False)
    return (*value, variables.bind(node, "weight", 1, None, writes=True))


@rule("scaled_dot_product_attention")
def _attention(variables: Variables, node: Node, query: Value, key: Value, value: Value, *mask: Value) -> Value:
    """Return the axes of the result of attention. A hidden unit is an attention head."""
    variables.refuse_moving(node, [query[-2], key[-2], value[-2]])
    scores = _product(variables, node, query, (*key[:-2], key[-1], key[-2]))
    for each in mask:
        scores = broadcast_all(variables, node, scores, each)
    return _product(variables, node, scores, value)


@rule("matmul", "bmm", "mm", "baddbmm")
def _matrices(variables: Variables, node: Node, *values: Value) -> Value:
    """Return the axes of a matrix product, whose two factors have the same units along the axis that is summed over."""
    *others, one, other = values
    return broadcast_all(variables, node, _product(variables, node, one, other), *others)


def _product(variables: Variables, node: Node, one: Value, other: Value) -> Value:
    if len(one) < 2 or len(other) < 2:
        raise UnsupportedArchitecture(
            f"{node} multiplies a vector, and fedhet supports products of matrices only: add an axis (x.unsqueeze(-1))"
        )
    if prod(map(entries, one[:-2])) > variables.batch:
        variables.refuse_moving(node, [*one[-2:], *other[-2:]])
    variables.read.append(variables.unify(one[-1], other[-2], node))
    return (*broadcast_all(variables, node, one[:-2], other[:-2]), one[-2], other[-1])


@rule(*GATES)
def _recurrent(variables: Variables, node: Node, value: Value, *states: Value) -> Several:
    """Return the axes of the outputs and states of an LSTM, GRU or RNN. Each gate has a row for each unit."""
    if "batch_first" not in node.options:
        raise UnsupportedArchitecture(f"{node} runs over packed sequences, which are not supported: pad them")
    if "weight_hr_l0" in node.parameters:
        raise UnsupportedArchitecture(f"{node} has projections, which are not supported: build it with proj_size=0")
    if not all(variables.graph[name].operator.removeprefix("new_").startswith("zeros") for name in node.inputs[1:]):
        raise UnsupportedArchitecture(
            f"{node} starts from a computed state, and fedhet supports zero states only: call it without a state"
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
                    variables.bind(node, f"{role}_{name}", 0, units * GATES[node.operator], writes=True)
            directions.append(units)
        hidden += directions
        axis = joined(*directions)
    batch = value[0] if node.options["batch_first"] else value[1]
    finals = tuple((batch, units) for units in hidden)
    final = Several(finals) if len(finals) > 1 else (fixed(1), *finals[0])
    return Several(((*value[:-1], axis), *(final,) * (1 + (node.operator == "lstm"))))

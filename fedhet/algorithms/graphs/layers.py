"""The graph of a network's layers, for graph hypernetworks (Litany et al., 2022, section 3; Zhang et al., 2019)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from operator import mul

from torch import Tensor, nn

from fedhet.algorithms.graphs.graph import ArchitectureGraph, Node, UnsupportedArchitecture, architecture_graph
from fedhet.algorithms.graphs.rules import GATES, RESHAPES, dims_of, order_of
from fedhet.models.copies import Start

JOINTS = {"add": "add", "cat": "cat", "concat": "cat", "stack": "stack"}
"""Type of a joint (an operator that combines several inputs, see `LayerNode`) by the operator's ATen name."""

NORM = "norm_"  # prefix of the roles (names within a layer) of the arrays of a BatchNorm that follows the layer


@dataclass(frozen=True)
class LayerNode:
    """A layer, including a BatchNorm that follows it, or a joint: an operator that combines several inputs.

    `type` describes it: ``c<in>_<out>_k<kernel>_s<stride>`` for a convolution, with ``_g<groups>`` and ``_d<dilation>``
    if not 1; ``l<in>_<out>`` for a linear layer; ``add``, ``cat`` and ``stack`` for joints; otherwise the operator and
    the shapes of its parameters. `name` is the operator's (see `Node`). An array's role is its name within the
    layer, such as ``weight``. `parameters`, `shapes` and `starts` map roles to ``state_dict`` names, to shapes, and to
    mean and standard deviation in a new network. `constants` are the roles of arrays that are not trained.
    """

    name: str
    type: str
    parameters: Mapping[str, str] = field(default_factory=dict, hash=False)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)
    constants: frozenset[str] = frozenset()
    starts: Mapping[str, Start] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class LayerGraph:
    """The layers of a network (`nodes`) in data-flow order, and the data flow (`edges`) as pairs of their indices."""

    nodes: tuple[LayerNode, ...]
    edges: tuple[tuple[int, int], ...]

    def __iter__(self) -> Iterator[LayerNode]:
        return iter(self.nodes)


def layer_graph(model: nn.Module, example: Tensor, starts: Mapping[str, Start] | None = None) -> LayerGraph:
    """Return the layers of a network and their data flow, traced with the batch of inputs `example` (N, ...).

    A module that is called twice is one node, and so are operators with tied parameters, and a layer with a BatchNorm
    that follows it. Nodes have the means and standard deviations in `starts` (see `starts_of`); None leaves them out.
    """
    graph = architecture_graph(model, example)
    layers: list[tuple[Node, dict[str, str]]] = []  # the operator that a layer is named after, and arrays by role
    owners: dict[str, int] = {}  # array -> its layer
    sources: dict[str, tuple[int, ...]] = {}  # operator -> the layers that its value comes from
    edges: set[tuple[int, int]] = set()
    for node in graph:
        before = tuple(dict.fromkeys(place for name in node.inputs for place in sources[name]))
        sources[node.name] = before
        flowing = [name for name in node.inputs if graph[name].operator != "constant"]
        if not node.parameters and (node.operator not in JOINTS or len(flowing) < 2):
            continue
        modules = [owners[name] for name in node.parameters.values() if name in owners]
        takes = not modules and len(before) == 1 and _takes(graph, *layers[before[0]], node)
        place = modules[0] if modules else before[0] if takes else len(layers)
        if place == len(layers):
            layers.append((node, {}))
        parameters = layers[place][1]
        for role, name in node.parameters.items():
            if name not in owners:
                owners[name] = place
                role = NORM + role if takes else role
                parameters[role if role not in parameters else f"{role}_{len(parameters)}"] = name
        sources[node.name] = (place,)
        edges |= {(source, place) for source in before if source != place}
    nodes = []
    for first, parameters in layers:
        shapes = {role: graph.shapes[name] for role, name in parameters.items()}
        constants = frozenset(role for role, name in parameters.items() if graph.kinds[name] != "trained")
        begun = {role: starts[name] for role, name in parameters.items() if starts and name in starts}
        nodes.append(LayerNode(first.name, _type(first, shapes), parameters, shapes, constants, begun))
    return LayerGraph(tuple(nodes), tuple(sorted(edges)))


def _takes(graph: ArchitectureGraph, layer: Node, parameters: Mapping[str, str], norm: Node) -> bool:
    if norm.operator != "batch_norm" or not parameters or layer.operator == "batch_norm":
        return False
    units = layer.shape[1 if layer.operator.startswith("conv") else -1]
    shapes = {graph.shapes[name] for name in norm.parameters.values()}
    return shapes == {(units,)} and not any(role.startswith(NORM) for role in parameters)


def _type(node: Node, shapes: Mapping[str, tuple[int, ...]]) -> str:
    weight = shapes.get("weight", ())
    if not shapes:
        return JOINTS[node.operator]
    if node.operator == "linear" and len(weight) == 2:
        return f"l{weight[1]}_{weight[0]}"
    if node.operator.startswith("conv") and len(weight) > 2:
        return _convolution(node, weight)
    weights = {role: shape for role, shape in shapes.items() if not role.startswith(NORM) and "running_" not in role}
    return "_".join([node.operator.replace(".", "_"), *("x".join(map(str, size)) or "1" for size in weights.values())])


def _convolution(node: Node, weight: tuple[int, ...]) -> str:
    groups = int(node.options.get("groups", 1))
    transposed = "transpose" in node.operator
    # (out, in / groups, ...), and (in, out / groups, ...) for transposed convolutions.
    channels = (weight[0], weight[1] * groups) if transposed else (weight[1] * groups, weight[0])
    kind = "ct" if transposed else "c"
    if len(weight) != 4:
        kind = f"{kind}{len(weight) - 2}d"
    stride, dilation = (_sizes(node.options.get(key, 1)) for key in ("stride", "dilation"))
    name = f"{kind}{channels[0]}_{channels[1]}_k{_sizes(weight[2:])}_s{stride}"
    if groups != 1:
        name += f"_g{groups}"
    return name if dilation == "1" else f"{name}_d{dilation}"


def _sizes(value: object) -> str:
    sizes = list(value) if isinstance(value, (list, tuple)) else [value]
    return "x".join(map(str, sizes if len(set(sizes)) > 1 else sizes[:1]))


# ---- the axis of features: a convolution writes along axis 1, a linear or recurrent layer along the last axis

PRODUCTS = ("matmul", "bmm", "mm", "baddbmm", "addmm")
_LAYERS = ("linear", "embedding", *GATES)


def features(graph: ArchitectureGraph) -> dict[str, int]:
    """Return the index of the feature axis in each node's result by node name; nodes without one are left out."""
    axis_of: dict[str, int] = {}
    for node in graph:
        axis = None
        if node.operator.startswith("conv") and node.parameters:
            axis = 1
        elif node.operator in PRODUCTS or (node.operator in _LAYERS and node.parameters):
            axis = len(node.shape) - 1
        elif source := next((name for name in node.inputs if name in axis_of), ""):
            axis = _moved(node, graph[source].shape, axis_of[source])
        if axis is not None:
            axis_of[node.name] = axis
    return {name: axis for name, axis in axis_of.items() if axis}  # without features along the batch axis


def _moved(node: Node, shape: tuple[int, ...], axis: int) -> int | None:
    """Return the axis of a node's result that corresponds to `axis` of its input, which has this `shape`, or None."""
    if node.operator in ("expand", "stack"):
        return None  # equal entries, or an axis in between
    if node.operator in ("transpose", "permute", "t"):
        return order_of(node, len(shape)).index(axis)
    if prod(shape) == prod(node.shape) and (len(node.shape) != len(shape) or node.operator in RESHAPES):
        start, end, *_ = list(accumulate((1, *shape), mul))[axis:]
        ends = enumerate(pairwise(accumulate((1, *node.shape), mul)))  # the axis that covers it, or its largest part
        axes = [new for new, (s, e) in ends if s < e and ((s <= start and end <= e) or (start <= s and e <= end))]
        return max(axes, key=lambda new: node.shape[new], default=None)
    if len(node.shape) < len(shape):
        removed = dims_of(node, len(shape))
        return None if axis in removed else axis - sum(dim < axis for dim in removed)
    return axis + len(node.shape) - len(shape)


def output_axis(graph: ArchitectureGraph, module: str, shape: Sequence[int] = ()) -> int:
    """Return the feature axis of a module's output (of this `shape`, if given), or raise UnsupportedArchitecture."""
    inside = [node for node in graph if node.shape and f"{node.module}.".startswith(f"{module}.")]
    node = next((node for node in reversed(inside) if node.shape[1:] == tuple(shape or node.shape)[1:]), None)
    if node is None or (axis := features(graph).get(node.name)) is None:
        problem = f"no axis with the features of layers was found in the output of module {module!r} of {graph.model}"
        raise UnsupportedArchitecture(f"{problem}: set the key blocks to other modules, such as convolutions")
    return axis


def channel_means(values: Tensor, axis: int = 1) -> Tensor:
    """Return the means (n, d) of values (n, ...) over all positions; `axis` is the axis of the d features."""
    if values.ndim <= 2:
        return values.clone()
    others = [other for other in range(1, values.ndim) if other != axis]
    # Units are tracked through `permute`, unlike `movedim`.
    return values.permute(0, axis, *others).flatten(2).mean(2)

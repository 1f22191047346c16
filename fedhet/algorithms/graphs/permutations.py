"""Permutation groups: sets of hidden units that can be permuted, in all parameters at once, with equal outputs.

Each axis of each tensor in the graph is a sequence of segments (ranges of indices, see `axes`); a variable stands for
the hidden units of a segment. The rules of operators derive the axes of results and add constraints to `Variables`: a
residual addition makes two variables equal, the channels that GroupNorm normalises together must move together, and
outputs of the network never move. Once equal variables are merged, each variable that can move is a group.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedhet.algorithms.graphs.axes import VALUE, Axis, Segment, Value, Variables, entries, fixed, joined, moving
from fedhet.algorithms.graphs.graph import ArchitectureGraph, Node, UnsupportedArchitecture
from fedhet.algorithms.graphs.rules import RULES, Several
from fedhet.models.copies import Kind


@dataclass(frozen=True)
class Slot:
    """An axis of a parameter along which hidden units lie; `role` is the parameter's name in its layer (``weight``)."""

    parameter: str
    role: str
    axis: int


@dataclass(frozen=True)
class PermutationGroup:
    """Units that can be permuted, in all arrays at once, without changing the function of a network.

    Attributes:
        index: index of the group in data-flow order.
        name: name of the first module whose outputs are the units.
        width: number of units.
        rows: parameters, and their axes, by which FedMA matches units: weights whose inputs are in earlier groups,
            then biases and BatchNorm's scale and bias.
        completes: other parameters, with the axes of their layers' outputs, to average once this group is matched, as
            they have no units of later groups: W_hh and b_hh, a residual block's last layer, BatchNorm's statistics.
    """

    index: int
    name: str
    width: int
    rows: tuple[Slot, ...]
    completes: tuple[Slot, ...]


@dataclass(frozen=True)
class PermutationGroups:
    """The permutation groups (sets of interchangeable hidden units) of a network, in data-flow order.

    Attributes:
        groups: the groups, which are also the items of this object.
        axes: segments (see `axes.Segment`) of each axis of each array, by ``state_dict`` name.
        fixed: parameters of layers whose outputs are not hidden units, such as the output layer.
        tied: for each further name of a parameter that has several, its first name.
        needs: for each array that only wider networks have: the index of a group, and the least number of units of
            this group in networks that have the array.
        kinds: kind of each array that is not trained (see `kinds_of`), by name.
    """

    groups: tuple[PermutationGroup, ...]
    axes: Mapping[str, tuple[Axis, ...]] = field(hash=False)
    fixed: tuple[str, ...]
    tied: Mapping[str, str] = field(hash=False)
    needs: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)
    kinds: Mapping[str, Kind] = field(default_factory=dict, hash=False)

    def __getitem__(self, index: int) -> PermutationGroup:
        return self.groups[index]

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[PermutationGroup]:
        return iter(self.groups)

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of units of each group."""
        return tuple(group.width for group in self.groups)

    def with_widths(self, widths: Sequence[int]) -> "PermutationGroups":
        """Return the groups of a network with the same layers, but with `widths[i]` units in group i."""

        def axis_of(segments: Axis) -> Axis:
            return tuple(s if s.group is None else replace(s, width=widths[s.group]) for s in segments)

        groups = tuple(replace(group, width=widths[group.index]) for group in self.groups)
        return replace(self, groups=groups, axes={name: tuple(map(axis_of, axes)) for name, axes in self.axes.items()})

    def shapes(self, widths: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return arrays' shapes by name for a network with the same layers, but with `widths[i]` units in group i."""
        lacking = {name for name, (group, least) in self.needs.items() if widths[group] < least}
        axes = self.with_widths(widths).axes
        return {name: tuple(map(entries, layout)) for name, layout in axes.items() if name not in lacking}


def permutation_groups(graph: ArchitectureGraph, *, partly: bool = False, whole: bool = False) -> PermutationGroups:
    """Return the permutation groups of an architecture: sets of hidden units whose order does not affect the outputs.

    In a plain network the units of a group are the outputs of one layer. In a residual network, layers whose outputs
    are added share a group. The network's inputs and outputs belong to no group (FedMA, Wang et al., ICLR 2020).

        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> groups = permutation_groups(architecture_graph(network, torch.zeros(2, 4)))
        >>> groups.widths, groups.axes["2.weight"]
        ((8,), ((Segment(group=None, width=2, block=1),), (Segment(group=0, width=8, block=1),)))

    A `Segment` has `block` entries for each unit. Raises an UnsupportedArchitecture error if fedhet does not know an
    operator, or if its result depends on the order of units; with `partly`, the units that it uses belong to no group
    instead. With `whole`, units of modules that reshape one axis into several, such as attention, belong to no group.
    """
    if graph.unused:
        raise UnsupportedArchitecture(
            f"the forward pass does not use the parameters {', '.join(graph.unused)}: remove them from the model"
        )
    choices: dict[str, int] = {}
    variables = _walked(graph, choices, partly=partly)
    while others := {node for axis, _ in variables.torn() if (node := variables.other_way(axis))}:
        choices |= {node: choices.get(node, 0) + 1 for node in others}
        variables = _walked(graph, choices, partly=partly)
    for axis, reason in variables.torn():
        if not partly:
            raise UnsupportedArchitecture(reason)
        variables.pin(axis)
    for divides, part, _ in variables.splits if whole else ():
        names = {name for each in graph if each.module == graph[divides].module for name in each.parameters.values()}
        for axis in [part, *(axis for (name, _), axis in variables.bound.items() if name in names)]:
            variables.pin(axis)
    return _solved(variables)


def _walked(graph: ArchitectureGraph, choices: Mapping[str, int], *, partly: bool) -> Variables:
    variables = Variables(graph, choices)
    values: dict[str, Value | Several] = {}
    for node in graph:
        inputs = [values[name] for name in node.inputs]
        try:
            values[node.name] = visit(variables, node, inputs)
        except UnsupportedArchitecture:
            if not partly:
                raise
            for axis in _axes(inputs):
                variables.pin(axis)
            values[node.name] = tuple(map(fixed, node.shape))
    return variables


def _axes(values: Iterable[Value | Several]) -> Iterator[Axis]:
    for value in values:
        yield from _axes(value.values) if isinstance(value, Several) else value


def visit(variables: Variables, node: Node, inputs: Sequence[Value | Several]) -> Value | Several:
    """Return the axes of the result of `node`, given the axes of its `inputs`; add its constraints to `variables`."""
    first = inputs[0] if inputs else ()
    if node.operator == "output":
        for axis in _axes(inputs[:1]):
            variables.pin(axis)
        return ()
    still = 0 in node.shape or not variables.moves(*_axes(inputs))
    if still and not node.parameters and node.operator != "expand":  # expand makes axes of equal entries
        return tuple(map(fixed, node.shape))  # any operator may work on fixed axes, or return an empty tensor
    if isinstance(first, Several) and node.operator in ("getitem", "select") and node.options.get("dim", 0) == 0:
        return first.values[node.options["index"]]
    if node.operator == "getitem":  # results of a pooling and its indices have the same axes
        return first
    _check(variables.graph, node)
    several = any(isinstance(value, Several) for value in inputs)
    result = Several(tuple(inputs)) if several else RULES[node.operator](variables, node, *inputs)
    main = result.values[0] if isinstance(result, Several) else result
    if several or isinstance(main, Several) or tuple(map(entries, main)) != node.shape:
        raise UnsupportedArchitecture(
            f"hidden units cannot be tracked through {node}, which returns shape {node.shape}: use another operator or "
            "method, or only one of the operator's results, such as h_n[-1] of an LSTM"
        )
    return result


def _check(graph: ArchitectureGraph, node: Node) -> None:
    if node.operator not in RULES:
        name = node.operator if "." in node.operator else f"aten.{node.operator}"
        before = node
        place = repr(node.module)
        while not before.module and before.inputs:  # the network's own forward: name the module that ran before
            before = graph[before.inputs[0]]
            place = f"the forward, after {before.module!r}"
        raise UnsupportedArchitecture(
            f"fedhet has no rule for operator {name} (in {place} of {graph.model}): use a "
            "supported layer (linear, convolution, pooling, flatten, dropout, activation, normalisation, embedding, "
            "attention, LSTM, GRU, RNN, add, cat) or leave this model out of methods that match layers"
        )
    for role, name in zip(node.arguments, node.inputs, strict=True):
        if role.startswith(("weight", "bias", "running_")):
            operator = graph[name].operator
            remedy = "make it a parameter of its own, as in nn.Linear"
            if operator in ("getitem", "select", "slice", "narrow"):
                remedy = "use a layer for each part or, in nn.MultiheadAttention, one tensor as query, key and value"
            raise UnsupportedArchitecture(
                f"{role} of {node.operator} in {node.module!r} is computed (by {operator}), not a parameter: {remedy}"
            )


def _solved(variables: Variables) -> PermutationGroups:
    graph, written = variables.graph, variables.written
    free = variables.moves(*variables.read)  # units that no layer reads are outputs, too (a second head)
    names: dict[int, str] = {}  # variable -> the layer that writes it first
    for place, (_, layer) in written.items():
        for segment in variables.known(variables.bound[place]):
            if segment.group in free:
                names.setdefault(segment.group, layer)
    numbers = {variable: index for index, variable in enumerate(names)}

    def numbered(segment: Segment) -> Segment:
        group = None if segment.group is None else numbers.get(segment.group)
        return Segment(None, segment.size) if group is None else replace(segment, group=group)

    axes = {}
    for name, shape in graph.shapes.items():
        first = graph.tied.get(name, name)
        bound = (variables.bound.get((first, axis), fixed(size)) for axis, size in enumerate(shape))
        axes[name] = tuple(joined(tuple(map(numbered, variables.known(axis)))) for axis in bound)
    kinds = {name: kind for name, kind in graph.kinds.items() if kind != "trained"}
    slots = [Slot(name, role, axis) for (name, axis), (role, _) in written.items()]
    groups = _groups(list(names.values()), axes, slots, kinds)
    moved = {slot.parameter for group in groups for slot in group.rows + group.completes}
    layers = [name for (name, _), (role, _) in written.items() if role != VALUE and not role.startswith("running_")]
    still = [name for name in layers if name not in moved]
    return PermutationGroups(groups, axes, tuple(dict.fromkeys(still)), graph.tied, kinds=kinds)


def _groups(
    names: Sequence[str], axes: Mapping[str, tuple[Axis, ...]], slots: Sequence[Slot], kinds: Mapping[str, Kind]
) -> tuple[PermutationGroup, ...]:
    widths = {segment.group: segment.width for layout in axes.values() for axis in layout for segment in axis}
    rows: list[list[Slot]] = [[] for _ in names]
    completes: list[list[Slot]] = [[] for _ in names]
    for slot in slots:
        parameter_axes = axes[slot.parameter]
        along = moving(parameter_axes[slot.axis])
        others = moving(*(segments for axis, segments in enumerate(parameter_axes) if axis != slot.axis))
        # Statistics describe no unit, and b_hh adds to b_ih (as in FedMA's code).
        describes = kinds.get(slot.parameter) != "statistic" and not slot.role.startswith("bias_hh")
        matched = [group for group in along if describes and all(other < group for other in others)]
        for group in matched:
            rows[group].append(slot)
        if along and (last := max(along | others)) not in matched:
            completes[last].append(slot)
    described = {slot.parameter for slots in rows for slot in slots}  # by another of its axes
    completes = [[slot for slot in slots if slot.parameter not in described] for slots in completes]
    weights_first = [sorted(slots, key=lambda slot: len(axes[slot.parameter]) == 1) for slots in rows]
    return tuple(
        PermutationGroup(index, name, widths[index], tuple(weights_first[index]), tuple(completes[index]))
        for index, name in enumerate(names)
    )

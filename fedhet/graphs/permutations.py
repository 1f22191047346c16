"""Which axes of a model's parameters move together: its permutation groups.

Every axis of every value that flows through the graph is a row of segments, each of them the units of one variable, or
fixed. Operators pass axes on, merge variables (a residual addition) or pin them (the model's output); what is left of
the variables are the groups. Nothing is guessed: an operator without a rule is refused, and so is a model whose hidden
axis meets something that would break it (a softmax over units, channels shuffled by a reshape).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fedhet.sharing import is_statistic

from .axes import Axis, Segment, Value, entries, fixed, joined, offsets
from .graph import ArchitectureGraph, Node, UnsupportedArchitecture
from .groups import PermutationGroup, PermutationGroups, Slot
from .rules import RULES, Several, Stacked
from .variables import Use, Variables


def permutation_groups(graph: ArchitectureGraph) -> PermutationGroups:
    """The permutation groups of an architecture, in data-flow order.

    In a plain network a group is a layer's output (FedMA, Wang et al. 2020, section 2); along a residual stream it is
    everything that is added to it. The output is the model's first tensor; its axes and the input's are in no group.
    Axes that meet a fixed one (a residual addition of the model's input) are fixed too.

    Raises:
        UnsupportedArchitecture: An operator, layer or combination that would tear a group apart, by name.
    """
    if graph.unused:
        raise UnsupportedArchitecture(
            f"the forward pass in eval mode does not use {', '.join(graph.unused)}, so nothing says which axes they "
            "read; remove them from the model"
        )
    variables = Variables(graph)
    values: dict[str, Value | Stacked | Several] = {}
    for node in graph:
        values[node.name] = _visit(variables, node, [values[name] for name in node.inputs])
    return _solved(variables)


def _visit(variables: Variables, node: Node, inputs: Sequence[Value | Stacked | Several]) -> Value | Stacked | Several:
    """The axes of a node's result."""
    first = inputs[0] if inputs else ()
    if node.operator == "getitem":
        # A pooling that also says where its maxima lay says it in the same axes.
        return first.values[node.options["index"]] if isinstance(first, Several) else first
    assert not isinstance(first, Several)  # torch.export takes several results apart at once
    if node.operator == "output":
        for value in first.values if isinstance(first, Stacked) else (first,):
            for axis in value:
                variables.pin(axis)
        return ()
    if node.operator == "select" and isinstance(first, Stacked):
        if node.options["dim"] != 0:
            raise UnsupportedArchitecture(f"{node} cuts an LSTM's final states along another axis than its layers")
        return first.values[node.options["index"]]
    _check(variables.graph, node)
    if any(isinstance(value, Stacked) for value in inputs):
        raise UnsupportedArchitecture(
            f"{node} takes the final states of all layers of an LSTM at once; take one layer's (h_n[-1]) or the "
            "output at the last time step (output[:, -1])"
        )
    result = RULES[node.operator](variables, node, *inputs)
    main = result.values[0] if isinstance(result, Several) else result
    if tuple(map(entries, main)) != node.shape:
        raise UnsupportedArchitecture(
            f"{node} gives shape {node.shape}, which fedhet's rule for its axes does not expect"
        )
    return result


def _check(graph: ArchitectureGraph, node: Node) -> None:
    """Refuse what there is no rule for."""
    if node.operator not in RULES:
        name = node.operator if "." in node.operator else f"aten.{node.operator}"
        raise UnsupportedArchitecture(
            f"fedhet does not know how operator {name} (in {node.module or 'the forward'!r} of {graph.model}) moves "
            "axes; use a supported layer (linear, convolution, pooling, flatten, dropout, activation, BatchNorm, "
            "embedding, LSTM, add, cat) or leave this model out of methods that match layers"
        )
    for role in node.arguments:
        if role.startswith(("weight", "bias", "running_")):
            raise UnsupportedArchitecture(
                f"{role} of {node.operator} in {node.module!r} is computed, not a parameter (a parametrization "
                "such as weight_norm?): remove it or leave this model out of methods that match layers"
            )
    if 0 in node.shape:
        raise UnsupportedArchitecture(f"{node} gives an empty tensor of shape {node.shape}; try a larger example")


def _solved(variables: Variables) -> PermutationGroups:
    """Return the groups that remain once the whole graph is walked."""
    graph, uses = variables.graph, list(dict.fromkeys(variables.uses))
    held = {variables.root(variable) for variable, refusal in variables.pins if refusal is None}
    for variable, refusal in variables.pins:
        if refusal is not None and variables.root(variable) not in held:
            raise UnsupportedArchitecture(refusal)
    units = {use: variables.along(variables.bound[use.parameter, use.axis]) for use in uses}
    # Units that nobody reads are outputs too (a second head).
    read = {variable for use, along in units.items() if not use.writes for variable in along}
    written = dict.fromkeys(variable for use, along in units.items() if use.writes for variable in along)
    free = [variable for variable in written if variable in read and variable not in held]
    numbers = {variable: index for index, variable in enumerate(free)}
    axes = {
        name: tuple(
            _numbered(variables, numbers, variables.bound.get((graph.tied.get(name, name), axis), fixed(size)))
            for axis, size in enumerate(shape)
        )
        for name, shape in graph.shapes.items()
    }
    groups = tuple(_group(index, uses, axes) for index in range(len(numbers)))
    moved = {slot.parameter for group in groups for slot in group.writers}
    trained = [name for name in dict.fromkeys(use.parameter for use in uses if use.writes) if not is_statistic(name)]
    return PermutationGroups(groups, axes, tuple(name for name in trained if name not in moved), graph.tied)


def _numbered(variables: Variables, numbers: Mapping[int, int], axis: Axis) -> Axis:
    """An axis of variables as one of groups; variables that are no group are fixed."""

    def numbered(segment: Segment) -> Segment:
        group = None if segment.group is None else numbers.get(variables.root(segment.group))
        return Segment(None, segment.size) if group is None else replace(segment, group=group)

    return joined([tuple(map(numbered, axis))])


def _group(index: int, uses: Sequence[Use], axes: Mapping[str, tuple[Axis, ...]]) -> PermutationGroup:
    rows: list[Slot] = []
    carried: list[Slot] = []
    readers: list[Slot] = []
    written = dict.fromkeys((use.parameter, use.axis) for use in uses if use.writes)
    seen = set()
    for use in uses:
        place = use.parameter, use.axis
        slots = [
            Slot(use.parameter, use.role, use.layer, use.axis, offset, segment.block)
            for offset, segment in offsets(axes[use.parameter][use.axis])
            if segment.group == index
        ]
        if not slots or place in seen or (not use.writes and place in written):
            continue
        seen.add(place)
        others = _moving(segments for axis, segments in enumerate(axes[use.parameter]) if axis != use.axis)
        if not use.writes:
            readers += slots
        elif not _is_matched(use.role) or any(group >= index for group in others):
            carried += slots
        else:
            rows += slots
    matched = {slot.parameter for slot in rows}
    completes = [
        name
        for name in dict.fromkeys(parameter for parameter, _ in written)
        if name not in matched
        and _moving(segments for axis, segments in enumerate(axes[name]) if (name, axis) in written)
        and max(_moving(axes[name])) == index
    ]
    rows.sort(key=lambda slot: len(axes[slot.parameter]) == 1)  # stable: weights first
    width = next(s.width for slot in rows + carried for s in axes[slot.parameter][slot.axis] if s.group == index)
    return PermutationGroup(
        index, (rows + carried)[0].layer, width, tuple(rows), tuple(carried), tuple(readers), tuple(completes)
    )


def _moving(axes: Iterable[Axis]) -> set[int]:
    """The groups along some axes."""
    return {segment.group for axis in axes for segment in axis if segment.group is not None}


def _is_matched(role: str) -> bool:
    """Whether a role's entries describe a unit: statistics do not, and b_hh adds to b_ih (as in FedMA's code)."""
    return not is_statistic(role) and not role.startswith("bias_hh")

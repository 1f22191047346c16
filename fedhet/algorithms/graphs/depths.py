"""Cutting a network by depth: the modules that end its blocks, and the arrays that the first blocks need."""

from collections.abc import Sequence

from torch import Tensor, nn

from .blocks import blocks
from .graph import ArchitectureGraph, Node, UnsupportedArchitecture
from .reading import architecture_graph


def block_ends(model: nn.Module, example: Tensor, count: int, names: str = "") -> tuple[str, ...]:
    """Return the names of the modules that end the first `count - 1` of a network's blocks, from shallow to deep.

    By default blocks are the last `stages`. A network with fewer stages, such as an MLP or a transformer, is cut into
    about equal numbers of layers, at places where later layers need one value only.

    Args:
        model: any network that `torch.export` can trace.
        example: inputs (n, ...).
        count: number of blocks, including the last one.
        names: names of the modules as in `blocks`; empty to find them.

    Raises:
        UnsupportedArchitecture: the network cannot be cut into `count` blocks, or lacks the named modules.
    """
    if count == 1:
        return ()
    if names:
        return blocks(model, example, chosen=names, count=count - 1)
    try:
        return blocks(model, example, chosen="stages", count=count)[:-1]
    except UnsupportedArchitecture:
        places, total = _places(architecture_graph(model, example))
    if len(places) < count - 1:
        raise UnsupportedArchitecture(
            f"{type(model).__name__} can be cut behind {', '.join(places.values()) or 'no module'} only, into "
            f"{len(places) + 1} blocks, and {count} are needed: set smaller depths, or name the modules that end them"
        )
    chosen: list[int] = []
    for number in range(1, count):
        possible = [each for each in places if each > max(chosen, default=0)]
        fitting = possible[: len(possible) - (count - 1 - number)]
        _, nearest = min((abs(layers - total * number / count), layers) for layers in fitting)
        chosen.append(nearest)
    return tuple(places[layers] for layers in chosen)


def depths(graph: ArchitectureGraph, ends: Sequence[str]) -> dict[str, int]:
    """Return the least number of blocks that need an array, for each name of the `state_dict`.

    `ends` are the modules that end all blocks but the last. Raises UnsupportedArchitecture if the network does not
    compute them in this order.
    """
    last = [_span(graph, name)[-1:] for name in ends]
    if not all(last) or last != sorted(last):
        raise UnsupportedArchitecture(f"{graph.model} does not compute {', '.join(ends)} in this order")
    found: dict[str, int] = {}
    for number, node in enumerate(graph):
        depth = 1 + sum(end[0] < number for end in last)
        for name in node.parameters.values():
            found.setdefault(name, depth)
    of_module = {name.rpartition(".")[0]: depth for name, depth in reversed(found.items())}
    whole = len(ends) + 1
    for name in graph.shapes:  # arrays that evaluation does not use, such as counters, belong to their module
        first = graph.tied.get(name, name)
        found.setdefault(name, found.get(first, of_module.get(first.rpartition(".")[0], whole)))
    return found


def _span(graph: ArchitectureGraph, module: str) -> list[int]:
    """Return the places of a module's operators."""
    return [n for n, node in enumerate(graph) if node.module == module or node.module.startswith(f"{module}.")]


def _places(graph: ArchitectureGraph) -> tuple[dict[int, str], int]:
    """Return modules after which later layers need one value only, by number of layers, and the number of layers."""
    number = {node.name: place for place, node in enumerate(graph)}
    data: set[int] = set()  # what depends on the inputs
    last_use: dict[int, int] = {}
    for place, node in enumerate(graph):
        used = [number[name] for name in node.inputs if number[name] in data]
        last_use |= dict.fromkeys(used, place)
        if used or node.operator == "input":
            data.add(place)
    total, layers, needed, names = sum(_is_layer(graph, node) for node in graph), 0, 0, dict[int, str]()
    for place, node in enumerate(graph):
        layers += _is_layer(graph, node)
        if place not in data:
            continue
        if needed <= place and 0 < layers < total and len(node.shape) > 1 and (name := _ended(graph, place)):
            names[layers] = name
        needed = max(needed, last_use.get(place, 0))
    return names, total


def _is_layer(graph: ArchitectureGraph, node: Node) -> bool:
    """Return whether an operator has weights that are a matrix or filters."""
    return any(role.startswith("weight") and len(graph.shapes[name]) > 1 for role, name in node.parameters.items())


def _ended(graph: ArchitectureGraph, place: int) -> str:
    """Return the outermost module whose only call ends with an operator, or an empty string."""
    parts = graph.nodes[place].module.split(".")
    for count in range(1, len(parts) + 1):
        span = _span(graph, name := ".".join(parts[:count]))
        between = (graph.nodes[other].operator for other in range(span[0], place) if other not in span)
        if span[-1] == place and all(each in ("parameter", "constant") for each in between):
            return name
    return ""

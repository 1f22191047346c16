"""Blocks of a network (consecutive layers), each named by its last module, and networks with early exits."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import accumulate
from math import prod
from typing import Self

import torch
from torch import Tensor, nn

from fedhet.algorithms.graphs.axes import fixed
from fedhet.algorithms.graphs.graph import ArchitectureGraph, Node, UnsupportedArchitecture, architecture_graph
from fedhet.algorithms.graphs.layers import PRODUCTS, channel_means, features, output_axis
from fedhet.algorithms.graphs.permutations import PermutationGroup, PermutationGroups, Slot
from fedhet.errors import ModelError
from fedhet.models.copies import in_evaluation_mode

STEM = 0.8
"""Fraction of a network's layers in its last stage above which earlier stages are not counted (see `stages`)."""


def blocks(model: nn.Module, example: Tensor, *, chosen: str = "stages", count: int = 4) -> tuple[str, ...]:
    """Return the names of the last modules of `count` blocks of a network, from shallow to deep.

    `chosen` is `stages` for the last `count` stages (layers of one spatial size), or `count` module names separated by
    commas. Of several such lists separated by semicolons, the first whose modules all exist is used. `example` is a
    batch of inputs. Raises an UnsupportedArchitecture error if there are fewer stages, or modules are missing.
    """
    if chosen != "stages":
        return _named(model, chosen, count)
    names = stages(model, example)
    if len(names) < count:
        raise UnsupportedArchitecture(
            f"network {type(model).__name__} has {len(names)} stages (layers of one spatial size) on an input of shape "
            f"{tuple(example.shape[1:])}: {', '.join(names) or 'none'}; {count} are needed, one for each block: set "
            f"the key blocks to the last modules of {count} blocks, separated by commas, or set a larger input-size"
        )
    return tuple(names[-count:])


def stages(model: nn.Module, example: Tensor) -> list[str]:
    """Return the name of the last module of each stage, from large to small spatial sizes.

    A stage has consecutive layers with outputs of one spatial size: the product of all axes but batch and features. It
    ends with a module whose output is all that later layers use of the stage. Of several, the least nested is named or,
    at equal depth, the last; `nn.Sequential` and `nn.ModuleList` add no depth. If more than `STEM` of all layers are in
    the last stage, those before it only prepare the inputs, as convolutions that make patches, and are left out.
    `example` is a batch of inputs.
    """
    graph = architecture_graph(model, example)
    modules = dict(model.named_modules())
    axes = features(graph)
    trunk = {place: name for place, _, name in _trunk(graph)}
    ends: dict[int, tuple[int, str, int]] = {}  # nesting, name and number of layers so far, by size
    layers = list(accumulate(_is_layer(graph, node) for node in graph))
    since: set[int] = set()  # sizes of the layers since the last stage ended
    for place, node in enumerate(graph):
        if node.name not in axes or len(node.shape) < 3 or 0 in node.shape:
            continue
        size = prod(node.shape[1:]) // node.shape[axes[node.name]]
        if _is_layer(graph, node):
            since.add(size)
        name = trunk.get(place, "")
        known = ends.get(size)
        follows = known is not None and not any(modules[known[1]].children())  # as an activation follows its layer
        if not name or not (size in since or follows):
            continue
        above = (modules[name[:end]] for end, letter in enumerate(name) if letter == ".")
        nesting = sum(not isinstance(module, nn.Sequential | nn.ModuleList) for module in above)
        ends = {other: end for other, end in ends.items() if other >= size}
        if known is None or nesting <= known[0]:
            ends[size] = nesting, name, layers[place]
        since.clear()
    before = [count for *_, count in ends.values()][-2:-1]
    if before and layers[-1] - before[0] > STEM * layers[-1]:
        ends = dict([ends.popitem()])
    return [name for _, name, _ in ends.values()]


def _named(model: nn.Module, chosen: str, count: int) -> tuple[str, ...]:
    # The first list in `chosen` (a,b;c,d) that has `count` names of modules.
    have = [name for name, _ in model.named_modules() if name]
    lists = [tuple(filter(None, map(str.strip, part.split(",")))) for part in chosen.split(";")]
    for names in lists:
        if len(names) == count and all(name in have for name in names):
            return names
    missing = "".join(f"; the network has no module {name!r}" for name in lists[-1] if name not in have)
    raise UnsupportedArchitecture(
        f"the key blocks must name the {count} modules that end the blocks of {type(model).__name__}, but is "
        f"{', '.join(lists[-1])}{missing}: choose from {', '.join(have)}"
    )


def block_ends(model: nn.Module, example: Tensor, count: int, names: str = "") -> tuple[str, ...]:
    """Return the names of the last modules of the first `count - 1` of a network's blocks, from shallow to deep.

    `names` has these names, separated by commas. If it is empty, blocks are the last `count` stages (see `stages`) or,
    if there are fewer, have about equal numbers of layers. `example` is a batch of inputs.
    Raises an UnsupportedArchitecture error if the network cannot be divided into `count` blocks.
    """
    if count == 1:
        return ()
    if names:
        return blocks(model, example, chosen=names, count=count - 1)
    try:
        return blocks(model, example, count=count)[:-1]
    except UnsupportedArchitecture:
        graph = architecture_graph(model, example)
    total = sum(_is_layer(graph, node) for node in graph)
    modules = dict(model.named_modules(remove_duplicate=False))
    shared = Counter(modules.values())  # a module with several names runs repeatedly
    ends = [(layers, name) for _, layers, name in _trunk(graph) if layers < total]
    places = {layers: name for layers, name in ends if shared[modules[name]] == 1}
    if len(places) < count - 1:
        layers = [node.module for node in graph if _is_layer(graph, node) and node.module]
        once = [name for name in layers if shared[modules[name]] == 1]
        raise UnsupportedArchitecture(
            f"network {type(model).__name__} has {len(places)} modules that can end a block "
            f"({', '.join(places.values()) or 'none'}), but {count} blocks (key depths) need {count - 1}: set smaller "
            f"depths, or name {count - 1} in the key blocks that run once, such as {', '.join(once[:5]) or 'none'}"
        )
    chosen = [0]
    for number in range(1, count):
        possible = [place for place in places if place > chosen[-1]]
        fitting = possible[: len(possible) - (count - 1 - number)]
        chosen.append(min(fitting, key=lambda layers: abs(layers - total * number / count)))
    return tuple(places[layers] for layers in chosen[1:])


def depths(graph: ArchitectureGraph, ends: Sequence[str]) -> dict[str, int]:
    """Return the number (from 1) of the first block that uses each array, by ``state_dict`` name.

    `ends` has the last module of each block but the last. Raises UnsupportedArchitecture if they run in another order.
    """
    inside = [[place for place, node in enumerate(graph) if f"{node.module}.".startswith(f"{end}.")] for end in ends]
    last = [places[-1] for places in inside if places]
    if len(last) < len(ends) or last != sorted(last):
        raise UnsupportedArchitecture(
            f"network {graph.model} does not run the modules {', '.join(ends)} in this order: list them in the key "
            "blocks in the order in which they run"
        )
    depth_of: dict[str, int] = {}
    for number, node in enumerate(graph):
        depth = 1 + sum(end < number for end in last)
        for name in node.parameters.values():
            depth_of.setdefault(name, depth)
    of_module = {name.rpartition(".")[0]: depth for name, depth in reversed(depth_of.items())}
    # Arrays that evaluation does not use, as counters, belong to their module; those of auxiliary heads, to all parts.
    for name in graph.shapes:
        first = graph.tied.get(name, name)
        depth_of.setdefault(name, depth_of.get(first, of_module.get(first.rpartition(".")[0], 1)))
    return depth_of


def _trunk(graph: ArchitectureGraph) -> Iterator[tuple[int, int, str]]:
    # Modules whose output is all that later layers need: (index of last operator, layers so far, name).
    number = {node.name: place for place, node in enumerate(graph)}
    reached: set[int] = set()  # what depends on the inputs
    data: set[int] = set()  # what depends on them and on parameters, unlike masks
    last_use: dict[int, int] = {}
    spans: dict[str, list[int]] = {}
    for place, node in enumerate(graph):
        filled = node.operator.startswith(("new_", "zeros", "ones", "full"))  # takes the shape of its input only
        used = [number[name] for name in node.inputs if number[name] in reached and not filled]
        last_use |= dict.fromkeys(data.intersection(used), place)
        if used or node.operator == "input":
            reached.add(place)
        if used and (node.parameters or _weights(graph, node) or not data.isdisjoint(used)):
            data.add(place)
        for module in accumulate(node.module.split("."), "{}.{}".format):
            spans.setdefault(module, []).append(place)
    layers, needed = 0, 0
    for place, node in enumerate(graph):
        layers += _is_layer(graph, node)
        if place not in data:
            continue
        if needed <= place and layers and len(node.shape) > 1 and (name := _ended(graph, place, spans)):
            yield place, layers, name
        needed = max(needed, last_use.get(place, 0))


def _is_layer(graph: ArchitectureGraph, node: Node) -> bool:
    if node.operator in PRODUCTS and any(len(shape) > 1 for shape in _weights(graph, node)):
        return True  # such as Conv1D of GPT-2
    return any(role.startswith("weight") and len(graph.shapes[name]) > 1 for role, name in node.parameters.items())


def _weights(graph: ArchitectureGraph, node: Node) -> list[tuple[int, ...]]:
    # Shapes of the parameters that an operator outside layers takes, without buffers, such as an adjacency matrix.
    taken = [graph[name] for name in node.inputs if graph[name].operator == "parameter"]
    return [each.shape for each in taken if graph.kinds[each.parameters["value"]] in ("trained", "frozen")]


def _ended(graph: ArchitectureGraph, place: int, spans: Mapping[str, Sequence[int]]) -> str:
    # The outermost module that runs once and ends with the operator at index `place`.
    for name in accumulate(graph.nodes[place].module.split("."), "{}.{}".format):
        between = {*range(spans[name][0], place)}.difference(spans[name]) if spans[name][-1] == place else {place}
        if name in graph.called and all(graph.nodes[other].operator in ("parameter", "constant") for other in between):
            return name
    return ""


EXITS = "exits"


class _LastExit(Exception):
    """Raised to end a forward pass after the last exit."""


class Exits(nn.Module):
    """A network with an exit (a classifier) after each of its blocks.

    The last exit is the network's own head. Each earlier exit averages features over positions, and applies a linear
    layer (`exits.0`, ...). The output is the last exit's logits in training mode, else the mean of all exits' logits.

    `network` is divided into `count` blocks. `names` has the last modules of all but the last block, separated by
    commas; if it is empty, `block_ends` chooses them. Modules and arrays keep their names. The attribute `depth` is the
    number of blocks to use; arrays of later blocks may be missing.
    """

    network: nn.Module
    exits: nn.ModuleList
    count: int
    names: str

    def __init__(self, network: nn.Module, count: int, names: str = "") -> None:
        super().__init__()
        if EXITS in network._modules:
            raise ModelError(f"{type(network).__name__} has a module 'exits', as early exits are named: rename it")
        # The network itself is not a submodule, so that its arrays keep their names.
        self.__dict__.update(network=network, count=count, names=names)
        self._parameters, self._buffers = network._parameters, network._buffers
        self._non_persistent_buffers_set = network._non_persistent_buffers_set
        self._modules = {**network._modules, EXITS: nn.ModuleList()}
        self.ends, self.depth = tuple[tuple[str, int], ...](), count  # modules, and the axes of their features

    def add_exits(self, groups: PermutationGroups) -> None:
        """Add an exit (a linear layer) after each block but the last; `groups` is from `groups_by_depth(self, ...)`."""
        self.ends = tuple((slot.parameter, slot.axis) for slot in groups[0].rows)
        floats = filter(torch.is_floating_point, self.network.parameters())
        shapes = groups.shapes(groups.widths)
        like = next(floats, torch.empty(0))
        for number in range(len(self.ends)):
            classes, width = shapes[f"{EXITS}.{number}.weight"]
            self.exits.append(nn.Linear(width, classes, dtype=like.dtype, device=like.device))

    def train(self, mode: bool = True) -> Self:
        """Set training mode (or evaluation mode if `mode` is False) of exits and network; return the module itself."""
        super().train(mode)
        self.network.train(mode)
        return self

    def _get_name(self) -> str:
        return self.network._get_name()  # the user's class, also in errors of PyTorch

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (n, classes) for inputs (n, ...): the last exit's in training, all exits' mean otherwise."""
        scores: list[Tensor] = []
        self.network.training = self.training

        def leave(exit: nn.Module, axis: int, _module: nn.Module, _args: object, value: object) -> None:
            scores.append(exit(channel_means(tensor_of(value), axis)))
            if len(scores) == self.depth:
                if torch.compiler.is_exporting():
                    reason = f"the forward pass ends after block {self.depth} of {self.count}"
                    raise ModelError(f"torch.export cannot trace this network, as {reason}: use torch.jit.trace")
                raise _LastExit

        ends = self.ends[: self.depth]
        with ExitStack() as hooks, suppress(_LastExit):
            for (name, axis), exit in zip(ends, self.exits, strict=False):
                hooks.enter_context(self.get_submodule(name).register_forward_hook(partial(leave, exit, axis)))
            try:
                scores.append(self.network(inputs))
            except TypeError as error:
                # A part lacks the weights of later blocks, which run if its last exit is skipped.
                if self.depth == self.count or "NoneType" not in str(error):
                    raise
        if len(scores) < len(ends) + (self.depth == self.count):
            raise ModelError(
                f"{self._get_name()} skips an end of its blocks ({', '.join(name for name, _ in ends)}) in some steps: "
                "set the probability with which it skips layers, such as layerdrop, to 0"
            )
        return scores[-1] if self.training else torch.stack(scores).mean(0)


def groups_by_depth(model: Exits, inputs: Tensor) -> PermutationGroups:
    """Return one `PermutationGroup` whose units are a network's blocks, so that depths can be handled like widths.

    Width d means the first d blocks; blocks are never permuted. The group's `rows` have, for each block but the last,
    the name of its last module and the feature axis of the module's output. `inputs` are examples (n, ...). Raises a
    ModelError or UnsupportedArchitecture error if the network cannot be divided into blocks, or cannot have exits.
    """
    network = model.network
    ends = block_ends(network, inputs, model.count, model.names)
    graph = architecture_graph(network, inputs)
    needed = depths(graph, ends)
    shapes = dict(graph.shapes)
    values = {name: list[Tensor]() for name in ends}
    with ExitStack() as hooks, in_evaluation_mode(network), torch.no_grad():
        for name in ends:
            add = lambda _module, _args, value, name=name: values[name].append(tensor_of(value, name))  # noqa: E731
            hooks.enter_context(network.get_submodule(name).register_forward_hook(add))
        outputs = network(inputs)
    if outputs.ndim != 2:
        raise ModelError(
            f"a network with early exits must return logits ({len(inputs)}, classes) for {len(inputs)} examples, but "
            f"{graph[graph.nodes[-1].inputs[0]].module!r} of {type(network).__name__} returns shape "
            f"{tuple(outputs.shape)}: change its forward, or use a method without early exits"
        )
    slots = []
    for number, name in enumerate(ends):
        if [len(value) for value in values[name]] != [len(inputs)]:
            problem = f"module {name} cannot end a block, since it runs repeatedly or changes the batch size"
            raise ModelError(f"{problem}: name other modules in the key blocks")
        shape = values[name][0].shape
        slots.append(Slot(name, "output", axis := output_axis(graph, name, shape)))
        shapes[f"{EXITS}.{number}.weight"] = outputs.shape[1], shape[axis]
        shapes[f"{EXITS}.{number}.bias"] = (outputs.shape[1],)
        needed |= {f"{EXITS}.{number}.{role}": number + 1 for role in ("weight", "bias")}
    axes = {name: tuple(map(fixed, shape)) for name, shape in shapes.items()}
    group = PermutationGroup(0, ",".join(ends), model.count, rows=tuple(slots), completes=())
    needs = {name: (0, depth) for name, depth in needed.items()}
    kinds = {name: kind for name, kind in graph.kinds.items() if kind != "trained"}
    return PermutationGroups((group,), axes, (), graph.tied, needs, kinds)


def tensor_of(value: object, name: str = "a block") -> Tensor:
    """Return the features (n, ..., d) in the output `value` of module `name`; raise a ModelError if it has none."""
    value = value[0] if isinstance(value, tuple) and value else value
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
        raise ModelError(f"exits need features (n, ..., d), but {name} returns none: set blocks to other modules")
    return value

"""Networks with exits: a classifier after each block, so that the first blocks are a complete network."""

from contextlib import ExitStack, suppress

import torch
from torch import Tensor, nn

from fedhet.algorithms.graphs.axes import fixed
from fedhet.algorithms.graphs.blocks import block_ends, depths
from fedhet.algorithms.graphs.graph import architecture_graph, in_evaluation_mode
from fedhet.algorithms.graphs.permutations import PermutationGroup, PermutationGroups, untrained
from fedhet.errors import ModelError

EXITS = "exits"


class _LastExit(Exception):
    """Raised to end a forward pass after the last exit."""


class Exits(nn.Module):
    """A network with an exit (a classifier) after each block.

    The exit of the last block is the network's own head. The others average over positions and apply the linear layers
    `exits.0`, `exits.1`, ... In evaluation mode the output is the mean of the logits of all exits. In training mode it
    is the logits of the last exit; those of the others are the outputs of the modules `exits.N`.

    The network shares its modules and arrays with the result; arrays keep their names. It has `count` blocks, of which
    all but the last end with the modules `names` (see `block_ends`). `depth` blocks are in use; arrays of later ones
    may be missing. Raises a ModelError if the network has a module named `exits`.
    """

    network: nn.Module
    exits: nn.ModuleList
    count: int
    names: str

    def __init__(self, network: nn.Module, count: int, names: str = "") -> None:
        super().__init__()
        if EXITS in network._modules:
            raise ModelError(f"{type(network).__name__} has a module named 'exits': rename it")
        # The network itself is not a submodule, so that its arrays keep their names.
        self.__dict__.update(network=network, count=count, names=names)
        self._parameters, self._buffers = network._parameters, network._buffers
        self._non_persistent_buffers_set = network._non_persistent_buffers_set
        self._modules = {**network._modules, EXITS: nn.ModuleList()}
        self.ends, self.depth = tuple[str, ...](), count

    def add_exits(self, groups: PermutationGroups) -> None:
        """Add the linear layers of the exits, with PyTorch's initial weights; `groups` is from `groups_by_depth`."""
        self.ends = tuple(filter(None, groups[0].name.split(",")))
        shapes, like = groups.shapes(groups.widths), next(self.network.parameters(), torch.empty(0))
        for number in range(len(self.ends)):
            classes, width = shapes[f"{EXITS}.{number}.weight"]
            self.exits.append(nn.Linear(width, classes, dtype=like.dtype, device=like.device))

    def _get_name(self) -> str:
        return self.network._get_name()  # the user's class, also in errors of PyTorch

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (n, classes): of the last exit in training mode, averaged over all exits in evaluation mode."""
        scores: list[Tensor] = []
        self.network.training = self.training

        def leave(exit: nn.Module, value: Tensor) -> None:
            scores.append(exit(_pooled(value)))
            if len(scores) == self.depth:
                raise _LastExit

        with ExitStack() as hooks, suppress(_LastExit):
            for name, exit in zip(self.ends[: self.depth], self.exits, strict=False):
                hook = lambda _module, _args, value, exit=exit: leave(exit, value)  # noqa: E731
                hooks.enter_context(self.get_submodule(name).register_forward_hook(hook))
            scores.append(self.network(inputs))
        return scores[-1] if self.training else torch.stack(scores).mean(0)


def groups_by_depth(model: Exits, inputs: Tensor) -> PermutationGroups:
    """Return a single group whose units are the blocks of a network with exits, before its exits are added.

    A network with a smaller width of this group has only the first blocks. `inputs` are examples (n, ...). Raises a
    ModelError if outputs are not one vector for each example or a block's output is not features, and an
    UnsupportedArchitecture error if the network cannot be divided into this number of blocks.
    """
    network = model.network
    ends = block_ends(network, inputs, model.count, model.names)
    graph = architecture_graph(network, inputs)
    needed = depths(graph, ends)
    shapes, values = dict(graph.shapes), dict[str, list[Tensor]]()
    with ExitStack() as hooks, in_evaluation_mode(network), torch.no_grad():
        for name in ends:
            hook = lambda _module, _args, value, name=name: values.setdefault(name, []).append(value)  # noqa: E731
            hooks.enter_context(network.get_submodule(name).register_forward_hook(hook))
        outputs = network(inputs)
    if outputs.ndim != 2:
        raise ModelError(
            f"a network with exits must return logits ({len(inputs)}, classes) for {len(inputs)} examples, and "
            f"{type(network).__name__} returns shape {tuple(outputs.shape)}"
        )
    for number, name in enumerate(ends):
        if len(values[name]) > 1:
            raise ModelError(
                f"{name} runs {len(values[name])} times, so a block cannot end with it: name modules that run once"
            )
        features = _pooled(values[name][0], name)
        if len(features) != len(inputs):
            raise ModelError(
                f"{name} returns a tensor for {len(features)} examples instead of {len(inputs)}: name modules whose "
                "output has the batch as first axis"
            )
        shapes[f"{EXITS}.{number}.weight"] = outputs.shape[1], features.shape[1]
        shapes[f"{EXITS}.{number}.bias"] = (outputs.shape[1],)
        needed |= {f"{EXITS}.{number}.{each}": number + 1 for each in ("weight", "bias")}
    axes = {name: tuple(map(fixed, shape)) for name, shape in shapes.items()}
    group = PermutationGroup(0, ",".join(ends), model.count, rows=(), completes=())
    needs = {name: (0, depth) for name, depth in needed.items()}
    return PermutationGroups((group,), axes, (), graph.tied, needs, untrained(graph))


def _pooled(value: object, name: str = "a block") -> Tensor:
    """Return features (n, d), averaged over positions of maps or over tokens; of several values, the first is used."""
    value = value[0] if isinstance(value, tuple) and value else value
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
        kind = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ModelError(f"{name} returns {kind}, after which there can be no exit: name modules that return features")
    return value.mean(1) if value.ndim == 3 else value.flatten(2).mean(2) if value.ndim > 3 else value

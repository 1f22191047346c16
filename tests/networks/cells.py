"""The property that each family of methods must have with a network, checked with the family's own functions."""

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from fedhet.algorithms.graphs import architecture_graph, layer_graph, permute, rows
from fedhet.algorithms.graphs.blocks import EXITS, Exits, groups_by_depth
from fedhet.algorithms.graphs.permutations import permutation_groups
from fedhet.algorithms.hypernets.hypernetwork import GraphHypernetwork
from fedhet.algorithms.hypernets.personal import PersonalHypernetwork, begin_of, calibrated
from fedhet.client.model_check import _is_head_of
from fedhet.client_apps.families.submodels import FirstBlocks
from fedhet.client_apps.heterofl import Scaled
from fedhet.client_apps.lora import LoRA, adapters, check_adapters
from fedhet.config import configuration
from fedhet.messages import load_into, to_arrays
from fedhet.models.copies import kinds_of, multiplies
from fedhet.models.representation import Representation, head_name
from fedhet.server import average_shared
from fedhet.setup import user_functions

from .listed import Build

Write = Callable[[], dict[str, Tensor]]
"""Function that generates the weights of a network, by name."""

SEEDS = (0, 1, 2)

GUESSED = ("timm/deit", "gated table", "squeezenet")
"""Networks whose outputs are not those of the layer that is guessed to be the head, or change them in place."""


class Network:
    """A network of the table: newly built ones, an example, and its outputs in evaluation mode."""

    def __init__(self, name: str, build: Build, example: Callable[[], Tensor]) -> None:
        self.name, self._build = name, build
        torch.manual_seed(0)
        self.example = example()
        self.model = self.built()
        with torch.no_grad():
            self.outputs = self.model(self.example)

    def built(self, seed: int = 0) -> nn.Module:
        """Return a new network in evaluation mode, as clients use it."""
        torch.manual_seed(seed)
        return user_functions._as_network("0", self._build()).eval()


def averaging(network: Network) -> None:
    """The average of two networks has each array's mean, and runs."""
    states = {str(seed): to_arrays(network.built(seed).state_dict()) for seed in (1, 2)}
    mean, model = average_shared(states, {"1": 1.0, "2": 3.0}), network.built()
    load_into(model.state_dict(), mean)
    for name, array in states["1"].items():
        if array.dtype.kind == "f":
            np.testing.assert_allclose(mean[name], 0.25 * array + 0.75 * states["2"][name], rtol=1e-5, atol=1e-7)
    assert model(network.example).isfinite().all()
    _learns(network, model)


def matching(network: Network) -> None:
    """Hidden units can be permuted without a change of the function, and have rows to match."""
    model = copy.deepcopy(network.model).double()
    example = network.example.double() if network.example.is_floating_point() else network.example
    groups = permutation_groups(architecture_graph(network.model, network.example))
    assert groups
    draw = np.random.default_rng(0)
    before, state = model(example), model.state_dict()
    moved = permute(state, groups, {group.index: draw.permutation(group.width) for group in groups})
    assert any((moved[name] != np.asarray(state[name])).any() for name in moved)
    for group in groups:
        assert len(rows(state, groups, group.index)) == group.width
    load_into(model.state_dict(), moved)
    torch.testing.assert_close(model(example), before, rtol=1e-6, atol=1e-9)


def width(network: Network) -> None:
    """A part of half the width has the first units of the arrays, outputs of the network's size, and learns."""
    groups = Scaled.groups_of(network.model, network.example[:2])
    for share in (0.5, 0.25):
        part = Scaled(share, groups)
        model = part.cut(network.built())
        state, whole = model.state_dict(), network.model.state_dict()
        assert sum(each.numel() for each in model.parameters()) < sum(
            each.numel() for each in network.model.parameters()
        )
        for name, axes in groups.axes.items():
            if all(len(axis) == 1 for axis in axes):
                kept = [
                    part.units[axis[0].group].size * axis[0].block if axis[0].group is not None else axis[0].size
                    for axis in axes
                ]
                assert torch.equal(state[name], whole[name][tuple(map(slice, kept))]), name
        size, own = _spread(model, {}, network), _spread(network.built(), {}, network)
        assert size < 30 * max(own, 0.1), f"outputs of {size:g}, the whole network's {own:g}"
        _learns(network, model)


def depth(network: Network) -> None:
    """The first of two blocks, with its exit, computes the first exit of the whole network, and learns."""
    model = Exits(network.built(), 2)
    groups = groups_by_depth(model, network.example)
    whole = FirstBlocks(1.0, groups).cut(model)
    part = FirstBlocks(0.5, groups).cut(Exits(network.built(), 2))
    names = part.state_dict().keys()
    load_into(
        part.state_dict(), {name: array for name, array in to_arrays(whole.state_dict()).items() if name in names}
    )
    name, axis = whole.ends[0]
    seen = []
    for module in (name, f"{EXITS}.0"):
        whole.get_submodule(module).register_forward_hook(lambda _m, _a, value: seen.append(value))
    with torch.no_grad():
        whole.eval()(network.example)
    torch.testing.assert_close(part.eval()(network.example), seen[1])
    value = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    assert part.get_submodule(f"{EXITS}.0").in_features == value.shape[axis] >= 4
    _learns(network, part)
    _learns(network, whole)


def hypernetworks(network: Network) -> None:
    """Generated networks have outputs of the network's own size, and after two steps a gradient at every array."""
    model, starts = network.built(), calibrated(network.built(), network.example)
    own = _mean_square([_spread(_kaiming(network.built(seed), starts), {}, network) for seed in SEEDS])
    graph = layer_graph(model, network.example, starts)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    begun = {name: begin_of(name, shape, starts.get(name)) for name, shape in shapes.items()}
    if not multiplies(model):
        begun = {name: each for name, each in begun.items() if each != begin_of(name, shapes[name])}

    def tiled(seed: int) -> tuple[Write, list[Tensor]]:
        made = GraphHypernetwork({}, "tiled", seed=seed)
        reading = made.read(graph)
        return lambda: made.write(reading), [*made.parameters()]

    def personal(seed: int) -> tuple[Write, list[Tensor]]:
        made = PersonalHypernetwork({}, seed, 2)
        made.write("0", shapes, begun)
        return lambda: made.write("0", shapes, begun), [*made.tensors.values()]

    for make in (tiled, personal):
        made = [make(seed) for seed in SEEDS]
        size = _mean_square([_spread(model, write(), network) for write, _ in made])
        assert own < 0.02 or own / 3 < size < 3 * own, f"outputs of {size:g}, the network's own {own:g}"
        _all_have_gradients(network, model, *made[0])


def lora(network: Network) -> None:
    """Adapters change nothing at first, and learn while the other weights stay."""
    config = configuration.resolve({"method": "lora", "lora.ranks": "2"})
    model = network.built()
    head = model.get_submodule(head_name(model))
    if not head.weight.any():
        nn.init.normal_(head.weight)
    with torch.no_grad():
        outputs = model(network.example)
    model = LoRA.adapt(model, config).eval()
    torch.testing.assert_close(model(network.example), outputs)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    check_adapters(model, network.example[:2])
    layers = adapters(model)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(network.example).square().sum().backward()
        optimizer.step()
    kinds = kinds_of(model)
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name]) == (kinds[name] != "trained") or kinds[name] == "trained", name
    assert any(not torch.equal(each.lora_b, torch.zeros_like(each.lora_b)) for each in layers.values())


def representation(network: Network) -> None:
    """The representation is the input of the layer that gives the outputs; a note says if the guess may be wrong."""
    found, outputs = Representation(network.model), network.outputs
    found.places = "pixels" if outputs.ndim > 2 else "one"
    with torch.no_grad():
        phi = found(network.example)
        with found.capture() as captured, found.head_output() as head:
            network.model(network.example)
        torch.testing.assert_close(captured(), phi)
        assert phi.ndim == 2
        assert len(phi) == len(network.example)
        assert head is not None
        layer, right = network.model.get_submodule(found.head), _is_head_of(head, outputs)
        if isinstance(layer, nn.Linear) and right:
            torch.testing.assert_close(layer(phi), outputs)
        assert right == (network.name not in GUESSED)


FAMILIES: dict[str, Callable[[Network], None]] = {
    each.__name__: each for each in (averaging, matching, width, depth, hypernetworks, lora, representation)
}


def _learns(network: Network, model: nn.Module) -> None:
    """Check that a training step runs, with a gradient that is a number at every array that the outputs depend on."""
    model.train()
    outputs = model(network.example)
    outputs.float().square().mean().backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert gradients
    assert all(each.isfinite().all() for each in gradients)
    model.eval()


def _kaiming(model: nn.Module, starts: dict[str, object]) -> nn.Module:
    """Scale the weights that have PyTorch's own initialisation to Kaiming's, as hypernetworks do; biases are 0."""
    for name, each in model.named_parameters():
        _, scale = begin_of(name, tuple(each.shape), starts.get(name))
        if each.ndim > 1 and starts.get(name) and starts[name].std:
            each.data *= scale / starts[name].std
        elif name.endswith("bias") and starts.get(name) and starts[name].std:
            each.data.zero_()
    return model


def _spread(model: nn.Module, weights: dict[str, Tensor], network: Network) -> float:
    """Return the root mean square of the outputs of a first forward pass in training mode."""
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = torch.func.functional_call(model.train(), weights, (network.example,))
    return float(outputs.double().square().mean().sqrt())


def _mean_square(sizes: list[float]) -> float:
    return float(np.sqrt(np.mean(np.square(sizes))))


def _all_have_gradients(network: Network, model: nn.Module, write: Write, parameters: list[Tensor]) -> None:
    """Check that every generated array has a gradient after two steps."""
    optimizer, trained = torch.optim.Adam(parameters, lr=1e-3), {}
    for _ in range(3):
        optimizer.zero_grad()
        torch.manual_seed(0)
        trained = write()
        for each in trained.values():
            each.retain_grad()
        outputs = torch.func.functional_call(model.train(), trained, (network.example,))
        (outputs - torch.randn_like(outputs)).square().mean().backward()
        optimizer.step()
    idle = [name for name, each in trained.items() if each.grad is None or not each.grad.any()]
    assert [name for name in idle if not name.startswith("aux")] == []

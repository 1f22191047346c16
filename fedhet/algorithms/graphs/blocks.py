"""Blocks of a network, from shallow to deep, named by the modules that end them.

They are known for torchvision's ResNets, EfficientNets and MobileNetV3s. The blocks of other networks are stages: all
layers of one spatial size.
"""

from contextlib import ExitStack
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.modules import pooling

from fedhet.algorithms.graphs.graph import UnsupportedArchitecture
from fedhet.algorithms.graphs.reading import in_evaluation_mode

_LAST_FOUR = {
    ("EfficientNet", 9): (4, 5, 6, 7),
    ("MobileNetV3", 17): (10, 12, 15, 16),
    ("MobileNetV3", 13): (6, 8, 11, 12),
}
"""By class and number of `features`, those that end the last four of the blocks that the networks' papers list."""

_POOLING = (pooling._MaxPoolNd, pooling._AvgPoolNd, pooling._AdaptiveMaxPoolNd, pooling._AdaptiveAvgPoolNd)


def blocks(model: nn.Module, example: Tensor, *, chosen: str = "last-four", count: int = 4) -> tuple[str, ...]:
    """Return the names of the modules whose outputs end a network's blocks, from shallow to deep.

    Args:
        model: any network.
        example: inputs (n, channels, height, width).
        chosen: `last-four` for the last blocks of torchvision's networks and the stages of others, `stages` for the
            stages of any network, or names of modules separated by commas. Among several lists, separated by
            semicolons, the first one is used whose modules all exist.
        count: number of blocks.

    Raises:
        UnsupportedArchitecture: the network has fewer stages, or lacks the named modules.
    """
    if chosen not in ("last-four", "stages"):
        return _named(model, chosen, count)
    if count == 4 and chosen == "last-four" and (known := _last_four(model)):
        return known
    names = stages(model, example)
    if len(names) < count:
        raise UnsupportedArchitecture(
            f"{type(model).__name__} has {len(names)} stages of one spatial size each on an input of "
            f"{tuple(example.shape[1:])} ({', '.join(names) or 'none'}), and {count} blocks are needed: name the "
            f"modules that end them, {count} names separated by commas, or set a larger input-size"
        )
    return tuple(names[-count:])


def stages(model: nn.Module, example: Tensor) -> list[str]:
    """Return the last module of each stage (the layers of one spatial size), from large to small.

    It is the last of the least nested modules that return feature maps of the size, where lists of modules do not
    count as nesting. Pooling modules end no stage, nor do branches with smaller maps than those that follow, such as
    gates. The model runs once, in evaluation mode.
    """
    ends: dict[tuple[int, ...], tuple[int, str]] = {}
    modules = dict(model.named_modules())

    def note(name: str, value: object) -> None:
        if not isinstance(value, Tensor) or value.ndim != 4:
            return
        above = (modules[name[:end]] for end, letter in enumerate(name) if letter == ".")
        nesting = sum(not isinstance(each, nn.Sequential | nn.ModuleList) for each in above)
        size = tuple(value.shape[2:])
        for smaller in [other for other in ends if prod(other) < prod(size)]:
            del ends[smaller]
        if size not in ends or nesting <= ends[size][0]:
            ends[size] = nesting, name

    with ExitStack() as hooks, in_evaluation_mode(model), torch.no_grad():
        for name, module in modules.items():
            if name and not isinstance(module, _POOLING):
                hook = module.register_forward_hook(lambda _module, _args, value, name=name: note(name, value))
                hooks.enter_context(hook)
        model(example)
    return [name for _, name in ends.values()]


def _last_four(model: nn.Module) -> tuple[str, ...]:
    """Return the last four blocks of one of torchvision's networks; nothing for any other network."""
    if not type(model).__module__.startswith("torchvision."):
        return ()
    if type(model).__name__ == "ResNet":
        return ("layer1", "layer2", "layer3", "layer4")
    features = getattr(model, "features", ())
    places = _LAST_FOUR.get((type(model).__name__, len(features)), ())
    return tuple(f"features.{place}" for place in places)


def _named(model: nn.Module, chosen: str, count: int) -> tuple[str, ...]:
    """Return the first list of modules that all exist."""
    lists = [tuple(filter(None, map(str.strip, part.split(",")))) for part in chosen.split(";")]
    have = dict(model.named_modules())
    for names in lists:
        if len(names) != count:
            raise UnsupportedArchitecture(
                f"{len(names)} modules are named ({', '.join(names)}), and {count} blocks are needed"
            )
        if all(name in have for name in names):
            return names
    missing = next(name for name in lists[-1] if name not in have)
    raise UnsupportedArchitecture(
        f"{type(model).__name__} has no module {missing!r} that could end a block; it has: "
        f"{', '.join(name for name in have if name)}"
    )

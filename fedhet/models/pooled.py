"""Change the width of a network's representation before its head."""

from collections import OrderedDict
from collections.abc import Mapping

from torch import nn

from fedhet.errors import ModelError


def place_before(model: nn.Module, name: str, layers: Mapping[str, nn.Module], width: int) -> nn.Module:
    """Replace a linear head by `layers` and a new linear `head`, and return the model.

    Args:
        model: The model, which is changed.
        name: Name of its head; empty if the model is the head.
        layers: Layers by name that map the representation (n, d) to (n, width).
        width: Number of inputs of the new head.
    """
    head = model.get_submodule(name)
    assert isinstance(head, nn.Linear)
    narrower = nn.Linear(width, head.out_features, bias=head.bias is not None, dtype=head.weight.dtype)
    placed = nn.Sequential(OrderedDict([*layers.items(), ("head", narrower)]))
    if not name:
        return placed
    parent, _, own_name = name.rpartition(".")
    setattr(model.get_submodule(parent), own_name, placed)
    return model


def pooled(model: nn.Module, width: int) -> nn.Module:
    """Insert adaptive average pooling to `width` before the last `nn.Linear`; raise a `ModelError` without one."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise ModelError(f"has no nn.Linear as head, before which to pool to width {width}")
    return place_before(model, names[-1], {"pooling": nn.AdaptiveAvgPool1d(width)}, width)

"""Networks whose representation is brought to another width before the head."""

from collections import OrderedDict
from collections.abc import Mapping

from torch import nn

from fedhet.errors import ModelError


def place_before(model: nn.Module, name: str, layers: Mapping[str, nn.Module], width: int) -> nn.Module:
    """Return the model with layers, and a new linear layer `head` of `width` inputs, in the place of a linear head.

    Args:
        model: The model, which is changed.
        name: The name of its head; empty if the model is that layer.
        layers: By name, what brings the representation (n, d) to (n, width).
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
    """Return the model with adaptive average pooling to `width`, which has no weights, before its last `nn.Linear`.

    A `ModelError` refuses a model without one.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise ModelError(f"has no nn.Linear for its head, before which to pool to {width}")
    return place_before(model, names[-1], {"pooling": nn.AdaptiveAvgPool1d(width)}, width)

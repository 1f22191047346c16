"""Finds state that a network keeps outside its state dict, which files and other processes lack."""

import torch
from torch import Tensor, nn

from fedhet.models.copies import copied
from fedhet.randomness import seeded


@torch.no_grad()
def unsaved_state(model: nn.Module, inputs: Tensor) -> str:
    """Return a warning that training changes what a network keeps outside its state dict, or an empty string.

    The outputs of a copy that was passed in training mode are compared with those of another one that has its state
    dict. A network that cannot be copied, or trained on such inputs, is not examined.

    Args:
        model: the network, which is not changed.
        inputs: (n, ...) transformed examples.
    """
    try:
        used, fresh = copied(model), copied(model)
        for _ in range(2):
            _pass(used.train(), inputs)
        fresh.load_state_dict(used.state_dict())
        alike = all(
            torch.allclose(_pass(used.train(mode), inputs), _pass(fresh.train(mode), inputs), equal_nan=True)
            for mode in (True, False)
        )
    except Exception:  # whatever a user's network raises; training itself will tell
        return ""
    if alike:
        return ""
    names = ", ".join(_changed(used, fresh)) or "something"
    return (
        f"training changes {names} in its {model._get_name()}, which is not in the state dict: files and other "
        "processes lack it, so results depend on the number of workers; register it as a buffer (register_buffer)"
    )


def _pass(network: nn.Module, inputs: Tensor) -> Tensor:
    with seeded(0, "unsaved state"):
        outputs: Tensor = network(inputs.clone())
    return outputs


def _changed(used: nn.Module, fresh: nn.Module) -> list[str]:
    """Return the names of attributes and buffers that differ between two networks of one structure."""
    return [
        f"{prefix}.{name}".lstrip(".")
        for (prefix, one), other in zip(used.named_modules(), fresh.modules(), strict=True)
        for name, value in (vars(one) | one._buffers).items()
        if isinstance(value, Tensor | int | float | str) and str(value) != str((vars(other) | other._buffers).get(name))
    ]

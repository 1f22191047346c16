"""The kinds of a network's arrays: trained parameter, frozen parameter, running statistic, or other buffer."""

from collections.abc import Hashable
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

Kind = Literal["trained", "frozen", "statistic", "buffer"]

RUNNING = ("running_", "moving_", "num_batches_tracked")
"""Prefixes of names of running statistics in modules that are not PyTorch's normalisations."""


def kinds_of(model: nn.Module) -> dict[str, Kind]:
    """Return the kind of each array of a network's state dict, by name.

    A parameter that requires gradients is trained, any other is frozen. Running statistics are buffers of BatchNorm and
    InstanceNorm, and of other modules if their names start with a prefix in `RUNNING`; not if the network keeps the
    module in evaluation mode during training, as in fine-tuning.
    """
    modes = {module: module.training for module in model.modules()}
    model.train()
    updated = {name: module for name, module in model.named_modules(remove_duplicate=False) if module.training}
    for module, mode in modes.items():
        module.training = mode
    kinds: dict[str, Kind] = {}
    for name, array in model.state_dict(keep_vars=True).items():
        prefix, _, key = name.rpartition(".")
        if isinstance(array, nn.Parameter):
            kinds[name] = "trained" if array.requires_grad else "frozen"
        elif prefix in updated and (isinstance(updated[prefix], _NormBase) or key.startswith(RUNNING)):
            kinds[name] = "statistic"
        else:
            kinds[name] = "buffer"
    return kinds


def storage_place(value: Tensor) -> Hashable:
    """Return a key for the memory of a tensor, which is equal for tied parameters."""
    return value.untyped_storage()._cdata, value.storage_offset(), tuple(value.shape), value.stride()


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return a dict that maps the second and later names of tied parameters in the state dict to the first name."""
    first: dict[Hashable, str] = {}
    named = {name: storage_place(value) for name, value in model.state_dict(keep_vars=True).items()}
    return {name: known for name, place in named.items() if (known := first.setdefault(place, name)) != name}

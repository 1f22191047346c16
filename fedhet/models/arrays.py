"""The kind of each array of a network: trained or frozen parameter, running statistic, or another buffer."""

from collections.abc import Hashable
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

Kind = Literal["trained", "frozen", "statistic", "buffer"]

RUNNING = ("running_", "moving_", "num_batches_tracked")
"""First parts of names of running statistics, for modules that are not PyTorch's normalisations."""


def kinds_of(model: nn.Module) -> dict[str, Kind]:
    """Return the kind of each array of a network's state dict, by name.

    A parameter that requires gradients is trained, any other one is frozen. A running statistic is a buffer that
    training updates: every buffer of BatchNorm and InstanceNorm and, in other modules, one whose name says so (see
    `RUNNING`). Modules that the network keeps in evaluation mode while it trains have no running statistics, as
    BatchNorm in fine-tuning, which an own `train` method keeps there. Other buffers are constants, masks or counters.
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
    """Where a living tensor's numbers lie: equal for tied parameters, whether or not they are one Python object."""
    return value.untyped_storage()._cdata, value.storage_offset(), tuple(value.shape), value.stride()


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map each name of a tensor but its first one to the first one, for tensors with several names in a state dict."""
    first: dict[Hashable, str] = {}
    named = {name: storage_place(value) for name, value in model.state_dict(keep_vars=True).items()}
    return {name: known for name, place in named.items() if (known := first.setdefault(place, name)) != name}

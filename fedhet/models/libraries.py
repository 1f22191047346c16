"""Untrained models of torchvision and timm, named `torchvision/NAME` and `timm/NAME`; libraries load on demand."""

import importlib
from types import ModuleType

import torch
from torch import Tensor, nn

from fedhet.errors import ModelError

LIBRARIES = ("torchvision", "timm")

# In training, auxiliary outputs would make their output a tuple.
_WITH_AUXILIARY_OUTPUTS = ("googlenet", "inception_v3")


def names_of(library: str) -> list[str]:
    """Return the names of a library's models; raise a `ModelError` if the library cannot be imported."""
    module = _import(library)
    names: list[str] = module.list_models(module=module) if library == "torchvision" else module.list_models()
    return names


def build_from_library(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build an untrained model of a library, such as `torchvision/resnet18`, for images (channels, height, width).

    Raises a `ModelError` if the model cannot take such an image or does not return (n, classes).
    """
    if len(input_shape) != 3:
        raise ModelError(f"the model needs images (channels, height, width), got shape {input_shape}")
    library, _, model = name.partition("/")
    if library == "torchvision":
        network = _torchvision(model, input_shape[0], classes)
    else:
        network = _import("timm").create_model(model, pretrained=False, num_classes=classes, in_chans=input_shape[0])
    try:
        with torch.no_grad():
            outputs = network.eval()(torch.zeros(2, *input_shape))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ModelError(
            f"the model cannot take images of shape {input_shape}: {error}; to resize images set input-size, such as "
            "input-size = 224"
        ) from error
    if not isinstance(outputs, Tensor) or outputs.shape != (2, classes):
        raise ModelError(f"the model does not return {classes} logits for an image: use a classification model")
    return network.train()


def _torchvision(model: str, channels: int, classes: int) -> nn.Module:
    """Build a torchvision model, with a new first convolution if the number of channels differs."""
    options = {"aux_logits": False, "init_weights": True} if model in _WITH_AUXILIARY_OUTPUTS else {}
    network: nn.Module = _import("torchvision").get_model(model, weights=None, num_classes=classes, **options)
    name, first = next((name, module) for name, module in network.named_modules() if isinstance(module, nn.Conv2d))
    if first.in_channels != channels:
        like = ("out_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode")
        settings = {name: getattr(first, name) for name in like}
        network.set_submodule(name, nn.Conv2d(channels, bias=first.bias is not None, **settings))
    return network


def _import(library: str) -> ModuleType:
    try:
        return importlib.import_module("torchvision.models" if library == "torchvision" else library)
    except ImportError as error:
        raise ModelError(
            f"models named {library}/... need {library}, which cannot be imported ({error}): run pip install {library}"
        ) from error

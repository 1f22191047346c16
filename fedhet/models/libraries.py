"""Networks of other libraries, untrained, by `torchvision/NAME` and `timm/NAME`; imported when they are asked for."""

import importlib
from difflib import get_close_matches
from types import ModuleType

import torch
from torch import Tensor, nn

from fedhet.errors import ModelError

LIBRARIES = ("torchvision", "timm")

# Their auxiliary outputs would make a tuple of what the loss is taken of, but only in training.
_WITH_AUXILIARY_OUTPUTS = ("googlenet", "inception_v3")


def of_library(name: str) -> bool:
    """Whether a name is one of a library's; it need not have such a model."""
    return name.partition("/")[0] in LIBRARIES and "/" in name


def also_in_library(name: str) -> str:
    """Return a hint that torchvision has a model of this name; empty if it has none, or is not installed."""
    try:
        check_name(f"torchvision/{name}")
    except ModelError:
        return ""
    return f"; torchvision/{name} is torchvision's"


def check_name(name: str) -> None:
    """Raise a `ModelError` if the library that is meant is not installed, or does not have the model."""
    library, _, model = name.partition("/")
    module = _import(library)
    known = module.list_models(module=module) if library == "torchvision" else module.list_models()
    if model not in known:
        close = " or ".join(repr(f"{library}/{match}") for match in get_close_matches(model, known, n=3))
        hint = f"; did you mean {close}?" if close else ";"
        raise ModelError(f"unknown model {name!r}{hint} {library}'s list_models() names all {len(known)}")


def build_from_library(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A library's untrained model for images of (channels, height, width), however many channels they have.

    A `ModelError` says if the forward pass fails on such an image, or does not give (n, classes).
    """
    if len(input_shape) != 3:
        raise ModelError(f"takes images of (channels, height, width), not {input_shape}")
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
            f"cannot take images of {input_shape}: {error}; where they are too small or not of the size that it is "
            "made for, set input-size (224 will do for most)"
        ) from error
    if not isinstance(outputs, Tensor) or outputs.shape != (2, classes):
        raise ModelError(f"does not give {classes} numbers for an image, so it is no classifier that can be used here")
    return network.train()


def _torchvision(model: str, channels: int, classes: int) -> nn.Module:
    """A model whose first convolution is drawn anew where it takes another number of channels."""
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
            f"models named {library}/... need {library}, which cannot be imported ({error}): pip install {library}"
        ) from error

"""The registry of models by name, and the assignment of models to clients."""

import importlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedhet.errors import ModelError, nearest
from fedhet.utils.randomness import numpy_generator

LIBRARIES = ("torchvision", "timm")

# In training, auxiliary outputs would make their output a tuple.
_WITH_AUXILIARY_OUTPUTS = ("googlenet", "inception_v3")


def names_of(library: str) -> list[str]:
    """Return the model names of `torchvision` or `timm`; raise a `ModelError` if the library cannot be imported."""
    module = _import(library)
    return module.list_models(module=module) if library == "torchvision" else module.list_models()


def build_from_library(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build an untrained `torchvision/NAME` or `timm/NAME`; raise a `ModelError` if `input_shape` does not fit."""
    if len(input_shape) != 3:
        raise ModelError(f"the model needs images (channels, height, width), not {input_shape}: use another model")
    library, _, model = name.partition("/")
    channels = input_shape[0]
    network: nn.Module
    if library == "timm":
        network = _import(library).create_model(model, pretrained=False, num_classes=classes, in_chans=channels)
    else:
        options = {"aux_logits": False, "init_weights": True} if model in _WITH_AUXILIARY_OUTPUTS else {}
        network = _import(library).get_model(model, weights=None, num_classes=classes, **options)
        place, first = next(
            (place, module) for place, module in network.named_modules() if isinstance(module, nn.Conv2d)
        )
        if first.in_channels != channels:
            like = ("out_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode")
            settings = {key: getattr(first, key) for key in like}
            network.set_submodule(place, nn.Conv2d(channels, bias=first.bias is not None, **settings))
    try:
        with torch.no_grad():
            network.eval()(torch.zeros(2, *input_shape))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ModelError(
            f"the model cannot take images of shape {input_shape}: {error}; to resize them set input-size = 224"
        ) from error
    return network.train()


def _import(library: str) -> ModuleType:
    try:
        return importlib.import_module("torchvision.models" if library == "torchvision" else library)
    except ImportError as error:
        raise ModelError(
            f"models named {library}/... need {library}, which cannot be imported ({error}): run pip install {library}"
        ) from error


Builder = Callable[[tuple[int, ...], int], nn.Module]
B = TypeVar("B", bound=Builder)
T = TypeVar("T")

_BUILDERS: dict[str, Builder] = {}

FAMILIES: dict[str, tuple[str, ...]] = {}
"""Names of the models in each family (a group of similar architectures), by the family's name."""


def register_model(name: str, family: str | None = None) -> Callable[[B], B]:
    """Return a decorator that registers `(input_shape, classes) -> nn.Module` as model `name`, and in a `family`."""

    def register(builder: B) -> B:
        _BUILDERS[name] = builder
        if family is not None:
            FAMILIES[family] = (*FAMILIES.get(family, ()), name)
        return builder

    return register


def names() -> list[str]:
    """Return the sorted names of the registered models, without models of other libraries."""
    return sorted(_BUILDERS)


def build(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a model, initialised by torch's global generator; raise a `ModelError` if it cannot take `input_shape`.

    `name` is one of `names()`, `torchvision/NAME` or `timm/NAME`. With `:WIDTH` at the end, the representation is
    pooled to this width before the last `nn.Linear`. `input_shape` is (channels, height, width) of an image or, for
    example, (characters,) of a text; `classes` is the number of outputs.
    """
    base, width = _parts(name)
    if base not in _BUILDERS:
        _check_library(base)
    builder = _BUILDERS.get(base) or partial(build_from_library, base)
    try:
        model = builder(tuple(input_shape), classes)
        if not width:
            return model
        heads = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        if not heads:
            raise ModelError(f"the network has no nn.Linear to pool before: name the model {base!r}, without :{width}")
        return place_before(model, heads[-1], {"pooling": nn.AdaptiveAvgPool1d(int(width))}, int(width))
    except ModelError as error:
        raise ModelError(f"model {name!r}: {error}") from None


def build_auxiliary(name: str, architectures: str, inputs: Tensor, classes: int) -> nn.Module:
    """Build the model `name`, which a method trains besides the clients' models, for examples `inputs` (n, ...).

    If `name` is empty, it is the first model in the comma-separated list `architectures`. If this model cannot take
    vectors, and `inputs` (n, d) are vectors, it is an MLP for floats, or a `TokenBag` for integers. `classes` is the
    number of outputs. Raises a `ModelError` if the model cannot take `inputs`.
    """
    shape = tuple(inputs.shape[1:])
    try:
        return build(name or expand(architectures)[0], shape, classes)
    except ModelError:
        if name or len(shape) != 1:
            raise
        return build("mlp-20" if inputs.is_floating_point() else "token-bag", shape, classes)


def expand(architectures: str) -> list[str]:
    """Return the names of the models in a comma-separated list, with families replaced by their models."""
    chosen: list[str] = []
    for name in filter(None, (part.strip() for part in architectures.split(","))):
        base, width = _parts(name)
        if base not in _BUILDERS and base not in FAMILIES:
            _check_library(base)
        chosen.extend(f"{member}:{width}" if width else member for member in FAMILIES.get(base, (base,)))
    if not chosen:
        raise ModelError(f"the key architectures has no model: choose from {', '.join([*names(), *sorted(FAMILIES)])}")
    return chosen


@lru_cache(maxsize=64)
def deal(architectures: str, how: str, clients: int, seed: int) -> tuple[str, ...]:
    """Return the name of each client's model; `architectures` has names of models or families, separated by commas.

    A family stands for all of its models. For `how` (`round-robin`, `blocks` or `random`) and `seed`, see `spread`.
    """
    return spread(expand(architectures), how, clients, seed)


def spread(values: Sequence[T], how: str, clients: int, seed: int) -> tuple[T, ...]:
    """Return one of K `values` for each of `clients` clients.

    `how` is `round-robin` (in turn), `blocks` (K consecutive blocks of clients) or `random` (drawn with `seed`).
    """
    if how == "random":
        draws = numpy_generator(seed, "assign").integers(len(values), size=clients)
        return tuple(values[draw] for draw in draws)
    if how == "blocks":
        return tuple(values[client * len(values) // clients] for client in range(clients))
    return tuple(values[client % len(values)] for client in range(clients))


def _parts(name: str) -> tuple[str, str]:
    base, colon, width = name.partition(":")
    if colon and not (width.isascii() and width.isdigit() and 0 < int(width) <= 2**16):
        raise ModelError(f"model {name!r}: the width after the colon must be a whole number from 1 to {2**16}")
    return base, width


def _check_library(name: str) -> None:
    library, _, model = name.partition("/")
    if library not in LIBRARIES or not model:
        hint = f"; torchvision/{name} is torchvision's" if name in names_of("torchvision") else ""
        raise ModelError(nearest("model", name, [*_BUILDERS, *FAMILIES]) + hint)
    if model not in (names := names_of(library)):
        raise ModelError(nearest("model", name, (f"{library}/{each}" for each in names)))


class _Called(nn.Module):
    """A module in place of a network's head. Networks can call it, but not read the head's attributes."""

    advice = ""

    def __getattr__(self, name: str) -> Any:
        if name in nn.Linear.__constants__ or name in ("weight", "bias"):
            raise AttributeError(
                f"the network's forward reads {name} of its last layer, which the method extends: call the last layer "
                f"instead{self.advice}"
            )
        return super().__getattr__(name)


class Placed(_Called, nn.Sequential):
    """A head with layers inserted before it."""

    advice = ", or set METHOD.width (such as fedproto.width) to 0 and name models without :WIDTH"


def place_before(model: nn.Module, name: str, layers: Mapping[str, nn.Module], width: int) -> nn.Module:
    """Replace a model's linear head by `layers` and a new head of `width` inputs, in place, and return the model.

    `name` is the head's name, empty if the model is the head; `layers` map the representation (n, d) to (n, width).
    """
    head = model.get_submodule(name)
    assert isinstance(head, nn.Linear)
    narrower = nn.Linear(width, head.out_features, dtype=head.weight.dtype)  # with a bias, equal for all clients
    placed = Placed(OrderedDict([*layers.items(), ("head", narrower)]))
    if not name:
        return placed
    parent, _, own_name = name.rpartition(".")
    setattr(model.get_submodule(parent), own_name, placed)
    return model


def before_calibration(model: nn.Module, head: str, classes: int) -> str:
    """Return the name of the last layer whose scores a `head`, with layers placed before it, could calibrate, or ""."""
    parent = head.rpartition(".")[0]
    place = parent if isinstance(model.get_submodule(parent), Placed) else head
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    layers = [linear.pop(name) for name in [*linear] if f"{name}.".startswith(f"{place}.")]
    if not layers or layers[0].in_features != classes:
        return ""
    return next((name for name, layer in reversed(linear.items()) if layer.out_features == classes), "")


class Beside(_Called):
    """A `head` and modules beside it, which only loss terms apply to the head's inputs (`Step.beside`)."""

    def __init__(self, modules: Mapping[str, nn.Module], head: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.head = head  # the last one, by which a network's head is found

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the head returns for its `inputs` (n, d)."""
        outputs: Tensor = self.head(inputs)
        return outputs

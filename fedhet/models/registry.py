"""Models by name, and their assignment to clients."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import TypeVar

from torch import Tensor, nn

from fedhet.errors import ModelError, nearest
from fedhet.models.libraries import LIBRARIES, build_from_library, names_of
from fedhet.utils.randomness import numpy_generator

Builder = Callable[[tuple[int, ...], int], nn.Module]
B = TypeVar("B", bound=Builder)
T = TypeVar("T")

_BUILDERS: dict[str, Builder] = {}

FAMILIES: dict[str, tuple[str, ...]] = {}
"""Names of families and their models."""

ASSIGNMENTS = ("round-robin", "blocks", "random")


def register_model(name: str, family: str | None = None) -> Callable[[B], B]:
    """Register a function `(input_shape, classes) -> nn.Module` under `name`, and as a member of `family`."""

    def register(builder: B) -> B:
        if name in _BUILDERS or name in FAMILIES:
            raise ModelError(f"model {name!r} is registered already")
        _BUILDERS[name] = builder
        if family is not None:
            FAMILIES[family] = (*FAMILIES.get(family, ()), name)
        return builder

    return register


def names() -> list[str]:
    """Return the names of the registered models, without those of other libraries, sorted."""
    return sorted(_BUILDERS)


def build(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a model, initialised by torch's global generator.

    Args:
        name: One of `names()`, `torchvision/NAME` or `timm/NAME`. With `:WIDTH` at the end, the representation is
            pooled to this width before the last `nn.Linear`.
        input_shape: Shape of one example: (channels, height, width) of an image, (characters,) of a text.
        classes: Number of outputs of the head, which is the size of the vocabulary for next characters.

    Raises:
        ModelError: The model is unknown, or cannot take such an input.
    """
    base, width = _parts(name)
    if base not in _BUILDERS:
        _check_library(base)
    builder = _BUILDERS.get(base) or partial(build_from_library, base)
    try:
        model = builder(tuple(input_shape), classes)
        return pooled(model, int(width)) if width else model
    except ModelError as error:
        raise ModelError(f"model {name!r}: {error}") from None


def build_auxiliary(name: str, architectures: str, inputs: Tensor, classes: int) -> nn.Module:
    """Build an auxiliary model of a method: `name`, or the first of the architectures.

    If the first architecture does not take rows of numbers (n, features), `mlp-20` is built for them. Raises a
    `ModelError` if the model cannot take `inputs` (n, ...).
    """
    shape, rows = tuple(inputs.shape[1:]), inputs.ndim == 2 and inputs.is_floating_point()
    try:
        return build(name or expand(architectures)[0], shape, classes)
    except ModelError:
        if name or not rows:
            raise
        return build("mlp-20", shape, classes)


def expand(architectures: str) -> list[str]:
    """Return the models in a comma-separated list of models and families, with optional widths (see `build`).

    Raises a `ModelError` for an unknown name or an empty list.
    """
    chosen: list[str] = []
    for name in filter(None, (part.strip() for part in architectures.split(","))):
        base, width = _parts(name)
        if base not in _BUILDERS and base not in FAMILIES:
            _check_library(base)
        chosen.extend(f"{member}:{width}" if width else member for member in FAMILIES.get(base, (base,)))
    if not chosen:
        raise ModelError(f"no architecture given; known: {', '.join([*names(), *sorted(FAMILIES)])}")
    return chosen


@lru_cache(maxsize=64)
def deal(architectures: str, how: str, clients: int, seed: int) -> tuple[str, ...]:
    """Assign the models in a list (see `expand`) to clients, in the way that `spread` describes.

    Raises a `ModelError` for an unknown model or an unknown `how`.
    """
    return spread(expand(architectures), how, clients, seed)


def spread(values: Sequence[T], how: str, clients: int, seed: int) -> tuple[T, ...]:
    """Assign values to clients.

    `how` is `round-robin` (clients get the values in turn), `blocks` (each of K values goes to a K-th of the clients,
    one after another) or `random` (uniform, by the seed). Raises a `ModelError` for any other `how`.
    """
    if how not in ASSIGNMENTS:
        raise ModelError(nearest("way to assign architectures", how, ASSIGNMENTS))
    if how == "random":
        draws = numpy_generator(seed, "assign").integers(len(values), size=clients)
        return tuple(values[draw] for draw in draws)
    if how == "blocks":
        return tuple(values[client * len(values) // clients] for client in range(clients))
    return tuple(values[client % len(values)] for client in range(clients))


def _parts(name: str) -> tuple[str, str]:
    """Split a name into the model or family and the width to which the representation is pooled, or an empty string."""
    base, colon, width = name.partition(":")
    if colon and not (width.isascii() and width.isdigit() and 0 < int(width) <= 2**16):
        raise ModelError(f"{name}: the width after the colon must be a whole number of 1 to {2**16}")
    return base, width


def _check_library(name: str) -> None:
    """Raise a `ModelError` unless a name that is not registered is a model of a library, such as torchvision."""
    library, _, model = name.partition("/")
    if library not in LIBRARIES or not model:
        hint = f"; torchvision/{name} is torchvision's" if name in names_of("torchvision") else ""
        raise ModelError(nearest("model", name, [*_BUILDERS, *FAMILIES]) + hint)
    if model not in (known := names_of(library)):
        close = " or ".join(repr(f"{library}/{match}") for match in get_close_matches(model, known, n=3))
        hint = f"; did you mean {close}?" if close else ";"
        raise ModelError(f"unknown model {name!r}{hint} {library}'s list_models() names all {len(known)}")


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

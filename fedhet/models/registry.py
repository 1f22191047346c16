"""Models by name: fedhet's own, those that users register, and those of other libraries."""

from collections.abc import Callable, Container
from functools import partial
from typing import TypeVar

from torch import nn

from fedhet.errors import ModelError, nearest
from fedhet.models.libraries import build_from_library, check_name, of_library

Builder = Callable[[tuple[int, ...], int], nn.Module]
B = TypeVar("B", bound=Builder)

_BUILDERS: dict[str, Builder] = {}

# A family is a list of models that a federation's clients are dealt from.
FAMILIES: dict[str, tuple[str, ...]] = {}


def register_model(name: str, family: str | None = None) -> Callable[[B], B]:
    """Register a function `(input_shape, classes) -> nn.Module` under `name`, and as a member of `family` if given."""

    def register(builder: B) -> B:
        if name in _BUILDERS or name in FAMILIES:
            raise ModelError(f"model {name!r} is registered already")
        _BUILDERS[name] = builder
        if family is not None:
            FAMILIES[family] = (*FAMILIES.get(family, ()), name)
        return builder

    return register


def names() -> list[str]:
    """Names of the registered models, sorted; those of other libraries are not among them."""
    return sorted(_BUILDERS)


def families() -> list[str]:
    """Names of the families of models, sorted."""
    return sorted(FAMILIES)


def known(name: str) -> bool:
    """Whether a name means a model or a family, rather than anything else; a library need not have such a model."""
    return name in _BUILDERS or name in FAMILIES or of_library(name)


def build(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A new model, its initialisation drawn from torch's global generator, which the caller seeds.

    Args:
        name: One of `names()`, or `torchvision/NAME` or `timm/NAME`.
        input_shape: Shape of one example: (channels, height, width) of an image, (characters,) of a text.
        classes: Number of outputs of the head; also the size of the vocabulary of a text.

    Raises:
        ModelError: There is no such model, or it cannot take such an input.
    """
    _check_name(name, _BUILDERS)
    builder = _BUILDERS.get(name) or partial(build_from_library, name)
    try:
        return builder(tuple(input_shape), classes)
    except ModelError as error:
        raise ModelError(f"model {name!r}: {error}") from None


def expand(architectures: str) -> list[str]:
    """The models that a configuration's `architectures` stands for.

    Args:
        architectures: Names of models and families, separated by commas; a library's model is imported to be found.

    Raises:
        ModelError: A name is unknown, or there is none.
    """
    chosen: list[str] = []
    for name in filter(None, (part.strip() for part in architectures.split(","))):
        _check_name(name, {**_BUILDERS, **FAMILIES})
        chosen.extend(FAMILIES.get(name, (name,)))
    if not chosen:
        raise ModelError(f"no architecture given; known: {', '.join([*names(), *families()])}")
    return chosen


def _check_name(name: str, registered: Container[str]) -> None:
    if name in registered:
        return
    if not of_library(name):
        raise ModelError(nearest("model", name, [*_BUILDERS, *FAMILIES]))
    check_name(name)

"""Models by name."""

from collections.abc import Callable

from torch import nn

from fedhet.errors import ModelError, nearest

Builder = Callable[[tuple[int, ...], int], nn.Module]

_BUILDERS: dict[str, Builder] = {}

# A family is a list of models that a federation's clients are dealt from.
FAMILIES: dict[str, tuple[str, ...]] = {}


def register_model(name: str, family: str | None = None) -> Callable[[Builder], Builder]:
    """Register a function `(input_shape, classes) -> nn.Module` under `name`, and as a member of `family` if given."""

    def register(builder: Builder) -> Builder:
        if name in _BUILDERS or name in FAMILIES:
            raise ModelError(f"model {name!r} is registered already")
        _BUILDERS[name] = builder
        if family is not None:
            FAMILIES[family] = (*FAMILIES.get(family, ()), name)
        return builder

    return register


def names() -> list[str]:
    """Names of the models, sorted."""
    return sorted(_BUILDERS)


def families() -> list[str]:
    """Names of the families of models, sorted."""
    return sorted(FAMILIES)


def build(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A new model with torch's default initialisation, drawn from torch's global generator, which the caller seeds.

    Args:
        name: One of `names()`.
        input_shape: Shape of one example: (channels, height, width) of an image, (characters,) of a text.
        classes: Number of outputs of the head; also the size of the vocabulary of a text.

    Raises:
        ModelError: There is no such model, or it cannot take such an input.
    """
    if name not in _BUILDERS:
        raise ModelError(nearest("model", name, [*_BUILDERS, *FAMILIES]))
    try:
        return _BUILDERS[name](tuple(input_shape), classes)
    except ModelError as error:
        raise ModelError(f"model {name!r}: {error}") from None


def expand(architectures: str) -> list[str]:
    """The models that a configuration's `architectures` stands for.

    Args:
        architectures: Names of models and families, separated by commas.

    Raises:
        ModelError: A name is unknown, or there is none.
    """
    chosen: list[str] = []
    for name in filter(None, (part.strip() for part in architectures.split(","))):
        if name not in FAMILIES and name not in _BUILDERS:
            raise ModelError(nearest("model", name, [*_BUILDERS, *FAMILIES]))
        chosen.extend(FAMILIES.get(name, (name,)))
    if not chosen:
        raise ModelError(f"no architecture given; known: {', '.join([*names(), *families()])}")
    return chosen

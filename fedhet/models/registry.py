"""Models by name (fedhet's, users' and other libraries'), and how they are assigned to clients."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TypeVar

from torch import Tensor, nn

from fedhet.errors import ModelError, nearest
from fedhet.models.libraries import also_in_library, build_from_library, check_name, of_library
from fedhet.models.pooled import pooled
from fedhet.randomness import numpy_generator

Builder = Callable[[tuple[int, ...], int], nn.Module]
B = TypeVar("B", bound=Builder)
T = TypeVar("T")

_BUILDERS: dict[str, Builder] = {}

FAMILIES: dict[str, tuple[str, ...]] = {}
"""Lists of models that a federation's clients are dealt from."""

ASSIGNMENTS = ("round-robin", "blocks", "random", "one-of-each")


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


def build(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A new model, its initialisation drawn from torch's global generator, which the caller seeds.

    Args:
        name: One of `names()`, or `torchvision/NAME` or `timm/NAME`; with `:WIDTH` behind it, the representation is
            pooled to this width before the last `nn.Linear`.
        input_shape: Shape of one example: (channels, height, width) of an image, (characters,) of a text.
        classes: Number of outputs of the head; also the size of the vocabulary of a text.

    Raises:
        ModelError: There is no such model, or it cannot take such an input.
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


def build_beside(name: str, architectures: str, inputs: Tensor, classes: int) -> nn.Module:
    """A network beside the clients' own: by its name, or the first of the architectures if there is none.

    For rows of numbers (n, features) that this first one does not take it is `mlp-20`. `inputs` (n, ...) are such as it
    gets. A `ModelError` says that it cannot take them.
    """
    shape, rows = tuple(inputs.shape[1:]), inputs.ndim == 2 and inputs.is_floating_point()
    try:
        return build(name or expand(architectures)[0], shape, classes)
    except ModelError:
        if name or not rows:
            raise
        return build("mlp-20", shape, classes)


def expand(architectures: str) -> list[str]:
    """The models that a comma-separated list of models and families, pooled or not (see `build`), stands for.

    A `ModelError` says that a name is unknown (a library is imported to be asked), or that there is none.
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
    """Deal architectures, as `expand` takes them, to so many clients.

    `how` is `round-robin` (client i gets the i-th, over and over), `blocks` (the first of K goes to the first K-th of
    the clients), `random` (uniform, by the seed), `one-of-each` (as many as clients), or a list, one a client.

    Raises:
        ModelError: An architecture or `how` is unknown, or the numbers do not agree.
    """
    dealt = expand(architectures)
    if how in ASSIGNMENTS[:3]:
        return spread(dealt, how, clients, seed)
    if how != "one-of-each":
        base, _ = _parts(how)
        if "," not in how and base not in _BUILDERS and base not in FAMILIES and not of_library(base):
            raise ModelError(nearest("way to assign architectures", how, ASSIGNMENTS))
        dealt = expand(how)
    if len(dealt) != clients:
        where = "to assign one-of-each" if how == "one-of-each" else "in the list"
        raise ModelError(f"{len(dealt)} architectures {where}, but {clients} clients: there must be as many")
    return tuple(dealt)


def spread(values: Sequence[T], how: str, clients: int, seed: int) -> tuple[T, ...]:
    """Deal values to so many clients: `round-robin`, `blocks` or `random`, as `deal` takes them."""
    if how == "random":
        draws = numpy_generator(seed, "assign").integers(len(values), size=clients)
        return tuple(values[draw] for draw in draws)
    if how == "blocks":
        return tuple(values[client * len(values) // clients] for client in range(clients))
    return tuple(values[client % len(values)] for client in range(clients))


def _parts(name: str) -> tuple[str, str]:
    """The name of a model or family, and the width to which its representation is pooled; empty: it is not."""
    base, colon, width = name.partition(":")
    if colon and "," not in name and not (width.isascii() and width.isdigit() and 0 < int(width) <= 2**16):
        raise ModelError(f"{name}: behind the colon stands the width to pool to, a whole number of 1 to {2**16}")
    return base, width


def _check_library(name: str) -> None:
    """Find out whether a name that is not registered is one of a library's models."""
    if not of_library(name):
        raise ModelError(nearest("model", name, [*_BUILDERS, *FAMILIES]) + also_in_library(name))
    check_name(name)

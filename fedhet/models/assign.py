"""Which client gets which architecture."""

from collections.abc import Sequence
from functools import lru_cache

from fedhet.errors import ModelError, nearest
from fedhet.models.registry import expand, families, known
from fedhet.randomness import numpy_generator

ASSIGNMENTS = ("round-robin", "blocks", "random", "one-of-each")


def assign(architectures: Sequence[str], how: str | Sequence[str], clients: int, seed: int) -> list[str]:
    """Deal architectures to clients.

    Args:
        architectures: What there is to deal.
        how: `round-robin` (client i gets the i-th, over and over), `blocks` (the first of K goes to the first K-th of
            the clients, and so on), `random` (uniform and independent, by the seed), `one-of-each` (the i-th client
            has the i-th of as many architectures), or an explicit list, one a client.
        clients: Number of clients.
        seed: Seed of `random`; the same seed deals the same.

    Returns:
        Each client's architecture, in order of the clients.

    Raises:
        ModelError: `how` is unknown, there is nothing to deal, or the numbers do not agree.
    """
    if not isinstance(how, str):
        return _one_each(how, clients, "in the list")
    if how not in ASSIGNMENTS:
        raise ModelError(nearest("way to assign architectures", how, ASSIGNMENTS))
    if not architectures:
        raise ModelError("there are no architectures to assign")
    if how == "one-of-each":
        return _one_each(architectures, clients, "to assign one-of-each")
    if how == "blocks":
        return [architectures[client * len(architectures) // clients] for client in range(clients)]
    if how == "random":
        draws = numpy_generator(seed, "assign").integers(len(architectures), size=clients)
        return [architectures[draw] for draw in draws]
    return [architectures[client % len(architectures)] for client in range(clients)]


@lru_cache(maxsize=64)
def deal(architectures: str, how: str, clients: int, seed: int) -> tuple[str, ...]:
    """Each client's architecture, as the keys `architectures` and `assign` of a configuration say; see `assign`.

    Raises:
        ModelError: as `expand` and `assign`.
    """
    listed = "," in how or (how not in ASSIGNMENTS and (known(how) or how in families()))
    return tuple(assign(expand(architectures), expand(how) if listed else how, clients, seed))


def _one_each(architectures: Sequence[str], clients: int, where: str) -> list[str]:
    if len(architectures) != clients:
        raise ModelError(f"{len(architectures)} architectures {where}, but {clients} clients: there must be as many")
    return list(architectures)

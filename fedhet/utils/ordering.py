"""Functions that sort clients by name and group values."""

from collections.abc import Iterable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Group the values of (key, value) pairs by key; keys and values keep their order."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def client_order(client: str) -> tuple[bool, int, str]:
    """Return a sort key for client names: numbers come first, by value, then other names."""
    return (False, int(client), client) if client.isdecimal() else (True, 0, client)


def in_order(clients: Iterable[str]) -> list[str]:
    """Return clients sorted by `client_order`."""
    return sorted(clients, key=client_order)

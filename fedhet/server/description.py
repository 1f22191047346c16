"""Clients' descriptions of their data (`fedhet describe`), as the server receives them."""

from typing import Any

import numpy as np

from fedhet.data.names import CLASSES, LABEL_COLUMNS
from fedhet.messages import Payload, Reply, WireError
from fedhet.messages.protocol import DESCRIBE, names_in
from fedhet.server.federation import Federation

NAMES = ("train", "validation", "test", "missing", "values", "mean", "std")


def describe(federation: Federation) -> dict[str, dict[str, Any]]:
    """Ask all clients for descriptions of their data, and return them by client; refusals count as failures."""
    described: dict[str, dict[str, Any]] = {}

    def keep(reply: Reply) -> None:
        described[reply.client] = description(reply)

    federation.ask(DESCRIBE, dict.fromkeys(federation.nodes, Payload()), keep)
    return {client: described[client] for client in federation.nodes if client in described}


def description(reply: Reply) -> dict[str, Any]:
    """Return the description in a client's reply as plain values by name; raise a WireError if it is invalid.

    The names are those of `NAMES`, `shape`, `range` (smallest and largest value) and `classes` (numbers of examples).
    What the node does not tell is None.
    """
    arrays = reply.arrays.get(DESCRIBE, {})
    shapes = {name: array.shape for name, array in arrays.items()}
    wrong = any(array.ndim != 1 or not np.isfinite(array).all() for array in arrays.values())
    if wrong or shapes.get("numbers") != (len(NAMES),):
        raise WireError("the client's description of its data is damaged: use the server's version of fedhet")
    numbers = [float(number) for number in arrays["numbers"]]
    values: dict[str, Any] = {name: int(number) for name, number in zip(NAMES[:5], numbers, strict=False)}
    values |= {"mean": numbers[5], "std": numbers[6], "shape": arrays["shape"].tolist()}
    values["missing"] = values["missing"] if values["missing"] >= 0 else None
    values["range"] = arrays["range"].tolist() if "range" in arrays else None
    counts = arrays["classes"].tolist() if "classes" in arrays else []
    values["classes"] = [int(count) if count >= 0 else None for count in counts]
    names = names_in(reply.report.names)
    listed = names.get(CLASSES, names.get(LABEL_COLUMNS, ()))
    if 1 < len(listed) <= len(counts):  # outputs beyond a client's names are for classes of others
        values |= {"names": listed, "classes": values["classes"][: len(listed)]}
    return values

"""The table of `fedhet describe`: clients' descriptions of their data, and that of all examples together."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Description = Mapping[str, Any]
"""A client's training examples: see `fedhet.server.description.description`."""


def pooled(described: Mapping[str, Description]) -> dict[str, Any]:
    """Return the description of all clients' examples together; what some client does not tell is None.

    The mean is sum_i n_i m_i / n, and the variance sum_i n_i (s_i^2 + (m_i - m)^2) / n, over clients i with n_i values.
    """
    clients = [*described.values()]
    total: dict[str, Any] = {name: sum(client[name] for client in clients) for name in ("train", "validation", "test")}
    missing = [client["missing"] for client in clients]
    total["missing"] = None if None in missing else sum(missing)
    counts = np.array([client["values"] for client in clients], float)
    means = np.array([client["mean"] for client in clients])
    stds = np.array([client["std"] for client in clients])
    total["values"] = int(counts.sum())
    count = max(total["values"], 1)
    total["mean"] = float(counts @ means / count)
    total["std"] = math.sqrt(float(counts @ (stds**2 + (means - total["mean"]) ** 2) / count))
    ranges = [client["range"] for client in clients if client["values"]]
    known = ranges and None not in ranges
    total["range"] = [min(low for low, _ in ranges), max(high for _, high in ranges)] if known else None
    shapes = [client["shape"] for client in clients]
    total["shape"] = shapes[0] if all(shape == shapes[0] for shape in shapes) else None
    counts_by_name = [dict(zip(_names(client), client["classes"], strict=True)) for client in clients]
    total["names"] = [*dict.fromkeys(name for counted in counts_by_name for name in counted)]
    columns = [[counted.get(name, 0) for counted in counts_by_name] for name in total["names"]]
    total["classes"] = [None if None in column else sum(column) for column in columns]
    return total


def _names(values: Description) -> list[str]:
    return values.get("names") or [str(number) for number in range(len(values["classes"]))]


def data_table(described: Mapping[str, Description]) -> list[list[str]]:
    """Return descriptions by client, and of all clients, as a table of text, headings first; `?` is not told."""
    lines = [["client", "train", "validation", "test", "missing", "shape", "mean", "std", "range", "classes"]]
    for name, values in [*described.items(), ("all", pooled(described))]:
        numbers = [str(values[key]) for key in ("train", "validation", "test")]
        shape = "?" if values["shape"] is None else "x".join(map(str, values["shape"]))
        span = "?" if values["range"] is None else " to ".join(f"{end:.4g}" for end in values["range"])
        counts = ["?" if count is None else str(count) for count in values["classes"]]
        if not all(name.isdecimal() for name in _names(values)):
            counts = [f"{name} {count}," for name, count in zip(_names(values), counts, strict=True)]
        classes = " ".join(counts).rstrip(",") or "-"
        missing = "?" if values["missing"] is None else str(values["missing"])
        lines.append([name, *numbers, missing, shape, f"{values['mean']:.4g}", f"{values['std']:.4g}", span, classes])
    return lines

"""Matching the neurons of one layer among clients, and those of a client that comes late.

The method, and the notation, are in `bbp_map`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .bbp_map import GlobalRows, Ints, assigned, scaled, squares_of, to_cost


@dataclass(frozen=True)
class LayerMatch:
    """The result of matching one layer.

    Attributes:
        assignments: For each client (L_j,) ints, the global row of each of its rows, none twice.
        weights: (L', D) float64, the global rows: posterior means (MAP), or plain means of the rows assigned.
        counts: (L',) ints, the number of clients in each global row.
        sigma2: The variance of local rows around global ones that was used.
        sigma0_2: The variance of global rows around the prior mean that was used.
    """

    assignments: list[Ints]
    weights: npt.NDArray[np.float64]
    counts: Ints
    sigma2: float = 1.0
    sigma0_2: float = 1.0


def match_layer(
    weights: Sequence[npt.ArrayLike],
    *,
    sigma2: float = 1.0,
    sigma0_2: float = 1.0,
    gamma: float = 7.0,
    prior_mean: npt.ArrayLike = 0.0,
    sweeps: int = 5,
    seed: int | np.random.RandomState = 0,
    average: str = "map",
    max_rows: int | None = None,
) -> LayerMatch:
    """Matches the neurons of one layer among clients by BBP-MAP (FedMA, algorithm 1).

    The widest client starts (the first of equals), the others follow in order of width; then in each sweep every
    client, in a random order, is taken out and matched again.

    Args:
        weights: One array (L_j, D) per client; a row is a neuron: its weights, then its bias. Costs are float32.
        sigma2: Variance of local rows around global ones.
        sigma0_2: Variance of global rows around the prior mean.
        gamma: Mass of the beta process: larger opens more global rows.
        prior_mean: Scalar or (D,), the prior mean of a global row (FedMA: .1 in the bias column).
        sweeps: How often each client is matched again.
        seed: Of the `np.random.RandomState` that draws the order of each sweep, or that generator itself.
        average: `map` for posterior means, `mean` for plain means of the rows assigned.
        max_rows: No global row is opened beyond this number (or beyond the widest client, if that is more).

    Returns:
        The assignments, the global rows and their counts.

    Raises:
        ValueError: Weights or options make no sense; the message names the client.
    """
    clients = _checked_weights(weights)
    prior = _checked_prior(prior_mean, clients[0].shape[1])
    _check_options(sigma2, sigma0_2, gamma, sweeps, average, max_rows)
    widest = max(len(rows) for rows in clients)
    matching = GlobalRows(
        [scaled(rows, 1 / sigma2) for rows in clients],
        s=1 / sigma2,
        s0=1 / sigma0_2,
        prior=prior,
        gamma=gamma,
        max_rows=None if max_rows is None else max(max_rows, widest),
    )
    matching.run(sweeps, seed if isinstance(seed, np.random.RandomState) else np.random.RandomState(seed))
    assignments, counts = matching.result()
    rows = _average(clients, assignments, counts, 1 / sigma2, 1 / sigma0_2, prior, average)
    return LayerMatch(assignments, rows, counts, sigma2, sigma0_2)


def attach(
    weights: npt.ArrayLike,
    match: LayerMatch,
    *,
    prior_mean: npt.ArrayLike = 0.0,
    average: str = "map",
) -> Ints:
    """Assigns the rows of a client that came late to the frozen global rows of a match.

    One assignment; no row is opened and the global rows stay what they are.

    Args:
        weights: (L, D), the client's rows.
        match: The match that the other clients took part in.
        prior_mean: As in that match.
        average: As in that match.

    Returns:
        (L,) ints, the global row of each of the client's rows, none twice.

    Raises:
        ValueError: The client has more rows than the match, another number of columns, or values that are not finite.
    """
    (rows,) = _checked_weights([weights])
    size, columns = match.weights.shape
    if rows.shape[1] != columns:
        raise ValueError(f"the late client's rows have {rows.shape[1]} columns, the frozen rows {columns}")
    if len(rows) > size:
        raise ValueError(f"the late client has {len(rows)} rows, more than the {size} frozen ones: it must wait")
    prior = _checked_prior(prior_mean, columns)
    _check_options(match.sigma2, match.sigma0_2, 1.0, 0, average, None)
    s, s0 = 1 / match.sigma2, 1 / match.sigma0_2
    counts = match.counts
    if average == "map":
        g = match.weights * (s0 + counts * s)[:, None]
    else:
        g = s0 * prior + s * counts[:, None] * match.weights
    late, frozen = scaled(rows, s), g.astype(np.float32)
    cost = late @ frozen.T
    to_cost(cost, squares_of(late), squares_of(frozen), counts, len(match.assignments) + 1, s, s0)
    return assigned(cost)


def _average(
    clients: list[npt.NDArray[np.floating]],
    assignments: list[Ints],
    counts: Ints,
    s: float,
    s0: float,
    prior: npt.NDArray[np.float64],
    average: str,
) -> npt.NDArray[np.float64]:
    total = np.zeros((len(counts), clients[0].shape[1]))
    for rows, assignment in zip(clients, assignments, strict=True):
        total[assignment] += rows
    if average == "mean":
        return total / counts[:, None]
    return (s * total + s0 * prior) / (s0 + s * counts)[:, None]


def _checked_weights(weights: Sequence[npt.ArrayLike]) -> list[npt.NDArray[np.floating]]:
    clients = [np.asarray(rows) for rows in weights]
    if not clients:
        raise ValueError("no clients to match")
    for j, rows in enumerate(clients):
        if rows.ndim != 2 or 0 in rows.shape:
            raise ValueError(f"client {j}: weights must be (rows, columns) with at least one of each, got {rows.shape}")
        if rows.dtype.kind not in "fiu":
            raise ValueError(f"client {j}: weights must be real numbers, got {rows.dtype}")
        if rows.shape[1] != clients[0].shape[1]:
            raise ValueError(f"client {j}: rows have {rows.shape[1]} columns, client 0's have {clients[0].shape[1]}")
        if not np.isfinite(rows).all():
            raise ValueError(f"client {j}: weights must be finite")
    return clients


def _checked_prior(prior_mean: npt.ArrayLike, columns: int) -> npt.NDArray[np.float64]:
    prior = np.asarray(prior_mean, dtype=np.float64)
    if prior.shape not in ((), (columns,)):
        raise ValueError(f"prior_mean must be a scalar or ({columns},), got {prior.shape}")
    if not np.isfinite(prior).all():
        raise ValueError("prior_mean must be finite")
    return np.broadcast_to(prior, (columns,))


def _check_options(
    sigma2: float, sigma0_2: float, gamma: float, sweeps: int, average: str, max_rows: int | None
) -> None:
    for name, value in (("sigma2", sigma2), ("sigma0_2", sigma0_2), ("gamma", gamma)):
        if not (np.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if sweeps < 0:
        raise ValueError(f"sweeps must not be negative, got {sweeps}")
    if average not in ("map", "mean"):
        raise ValueError(f"average must be 'map' or 'mean', got {average!r}")
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows must be positive, got {max_rows}")

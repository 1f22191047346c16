"""Matching of one layer's neurons among clients; the notation is as in `bbp_map`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedhet.algorithms.matching.bbp_map import GlobalRows, Ints, assigned, scaled, squares_of, to_cost


@dataclass(frozen=True)
class LayerMatch:
    """The result of matching one layer.

    Attributes:
        assignments: for each client the global row of each of its rows (L_j,), all different.
        weights: global rows (L', D) in float64, which are posterior means or plain means of the assigned rows.
        counts: number of clients that share each global row (L',).
        sigma2, sigma0_2: variances of rows around global rows, and of global rows around the prior mean.
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
    """Match the neurons of one layer among clients by BBP-MAP (FedMA, algorithm 1).

    Clients are matched from wide to narrow. Then each sweep removes every client, in a random order, and matches it
    again. Costs are computed in float32.

        >>> rows = np.random.randn(5, 20)
        >>> match = match_layer([rows, rows[::-1]], gamma=1.0)
        >>> match.assignments
        [array([0, 1, 2, 3, 4]), array([4, 3, 2, 1, 0])]

    `weights` has an array (L_j, D) for each client; a row has a neuron's weights and its bias. The variances `sigma2`
    and `sigma0_2` are as in `LayerMatch`; a larger mass `gamma` of the beta process leads to more global rows. The
    prior mean is a number or (D,) (FedMA: 0.1 in the bias column), and `average` is `map` for posterior means or
    `mean`. There are at most `max_rows` global rows, or as many as the widest client has. Raises a ValueError that
    names a client whose weights are not finite or have a wrong shape.
    """
    clients = _checked(weights)
    prior = np.broadcast_to(np.asarray(prior_mean, dtype=np.float64), clients[0].shape[1:])
    matching = GlobalRows(
        [scaled(rows, 1 / sigma2) for rows in clients],
        s=1 / sigma2,
        s0=1 / sigma0_2,
        prior=prior,
        gamma=gamma,
        max_rows=None if max_rows is None else max(max_rows, *map(len, clients)),
    )
    matching.run(sweeps, seed if isinstance(seed, np.random.RandomState) else np.random.RandomState(seed))
    assignments, counts = matching.result()
    total = np.zeros((len(counts), clients[0].shape[1]))
    for rows, assignment in zip(clients, assignments, strict=True):
        total[assignment] += rows
    if average == "mean":
        means = total / counts[:, None]
    else:
        s, s0 = 1 / sigma2, 1 / sigma0_2
        means = (s * total + s0 * prior) / (s0 + s * counts)[:, None]
    return LayerMatch(assignments, means, counts, sigma2, sigma0_2)


def attach(weights: npt.ArrayLike, match: LayerMatch, *, prior_mean: npt.ArrayLike = 0.0, average: str = "map") -> Ints:
    """Assign the rows (L, D) of a client that joins later to different global rows (L,), without changing the match.

    `prior_mean` and `average` must be the arguments that `match_layer` had. Raises a ValueError if the client has more
    rows than the match.
    """
    rows, size = np.asarray(weights), len(match.weights)
    if len(rows) > size:
        raise ValueError(
            f"a client that joins late has {len(rows)} rows, but there are {size} global rows: match all clients again"
        )
    s, s0, counts = 1 / match.sigma2, 1 / match.sigma0_2, match.counts
    if average == "map":
        g = match.weights * (s0 + counts * s)[:, None]
    else:
        g = s0 * np.asarray(prior_mean, dtype=np.float64) + s * counts[:, None] * match.weights
    late, frozen = scaled(rows, s), g.astype(np.float32)
    cost = late @ frozen.T
    to_cost(cost, squares_of(late), squares_of(frozen), counts, len(match.assignments) + 1, s, s0)
    return assigned(cost)


def estimate_variances(
    weights: Sequence[npt.ArrayLike],
    *,
    gamma: float = 1.0,
    prior_mean: npt.ArrayLike = 0.0,
    iterations: int = 5,
    **options: Any,
) -> dict[str, float]:
    """Estimate `sigma2` and `sigma0_2` for a layer so that corresponding neurons of clients are merged.

        sigma0_2 = v,    sigma2 = v (v + e) / (v - e)

    v is the variance of all rows around the prior mean, and e the residual variance of merged rows. Merging two rows of
    correlation r increases the posterior if r > sigma0_2 / (sigma0_2 + sigma2); sigma2 places this threshold halfway
    between the correlations of unrelated rows (0) and of the matches found (1 - e / v). Matching and estimation
    alternate, from sigma2 = v, until sigma2 converges. If no rows are merged, or if e > v / 2, sigma2 is v.
    """
    clients = [np.asarray(rows, dtype=np.float64) for rows in weights]
    mean = np.asarray(prior_mean, dtype=np.float64)
    total = sum(rows.size for rows in clients)
    spread = sum(float(np.square(rows - mean).sum()) for rows in clients) / total
    if not spread > 0:
        return {"sigma2": 1.0, "sigma0_2": 1.0}
    sigma2 = spread
    for _ in range(iterations):
        match = match_layer(
            weights, sigma2=sigma2, sigma0_2=spread, gamma=gamma, prior_mean=prior_mean, average="mean", **options
        )
        merged = sum(len(rows) for rows in clients) - len(match.counts)
        if merged == 0:
            break
        residuals = sum(
            float(np.square(rows - match.weights[assignment]).sum())
            for rows, assignment in zip(clients, match.assignments, strict=True)
        )
        within = residuals / (merged * clients[0].shape[1])
        if within > spread / 2:
            return {"sigma2": spread, "sigma0_2": spread}
        previous, sigma2 = sigma2, spread * (spread + within) / (spread - within)
        if np.isclose(sigma2, previous, rtol=1e-3):
            break
    return {"sigma2": sigma2, "sigma0_2": spread}


def _checked(weights: Sequence[npt.ArrayLike]) -> list[npt.NDArray[np.floating]]:
    clients = [np.asarray(rows) for rows in weights]
    for j, rows in enumerate(clients):
        if rows.ndim != 2 or not rows.size or rows.shape[1] != clients[0].shape[1] or not np.isfinite(rows).all():
            raise ValueError(
                f"client {j}: weights must be finite, of shape (rows, columns), and have the same number of columns as "
                f"client 0; got shape {rows.shape}, and {clients[0].shape} for client 0"
            )
    return clients

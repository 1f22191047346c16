"""BBP-MAP: matching of one layer's neurons among clients (Wang et al., ICLR 2020, section 2; Yurochkin et al., 2019).

A *row* has a neuron's weights. The notation is as in the papers: row l of client j, w_jl, is drawn around the global
row theta_i that it is assigned to, with variance sigma2 in every column; global rows are drawn around the prior mean mu
with variance sigma0_2. With s = 1 / sigma2 and s0 = 1 / sigma0_2, a global row that n_i clients share is described by

    g_i = s0 * mu + s * (sum of the rows assigned to it),    G_i = s0 + n_i * s,    posterior mean g_i / G_i.

The rows of one of J clients are assigned to different global rows so that the sum of their values is maximal. The
value of a row l is, with the mass parameter gamma of the Beta process,

    an existing row i:   |s w_l + g_i|^2 / (s + G_i) - |g_i|^2 / G_i + log(c_i / (J - c_i)),   c_i = min(n_i, 10)
    the k-th new row:    |s w_l + s0 mu|^2 / (s + s0) - |s0 mu|^2 / s0 - 2 log k + 2 log(gamma / J)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.intp]

MOST_POPULAR = 10  # upper bound of c_i, the number of clients that share global row i, in the value of a match
ITERATIONS = 5  # largest number of iterations in which variances are estimated


@dataclass(frozen=True)
class LayerMatch:
    """The result of matching one layer: the rows (neurons) of clients that correspond are merged into global rows.

    Attributes:
        assignments: for each client, the indices (L_j,) of the global rows that its L_j rows belong to, all different.
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

        >>> rows = np.random.randn(5, 20)
        >>> match = match_layer([rows, rows[::-1]], gamma=1.0)
        >>> match.assignments
        [array([0, 1, 2, 3, 4]), array([4, 3, 2, 1, 0])]

    `weights` has an array (L_j, D) for each client j; a row has a neuron's weights and its bias. Clients' rows have the
    variance `sigma2` around global rows; global rows have the variance `sigma0_2` around `prior_mean`, a number or an
    array (D,) (FedMA: 0.1 in the bias column). A larger `gamma`, the mass of the beta process, leads to more global
    rows: at most max(`max_rows`, L_1, L_2, ...), or any number for None. They are posterior (`average` is `map`) or
    plain means (`mean`) of the clients' rows. Each of the `sweeps` matches every client again, in a random order drawn
    with `seed`. Returns the global rows, with the clients' rows assigned. Raises a ValueError for invalid weights.
    """
    clients = _checked(weights)
    prior = np.broadcast_to(np.asarray(prior_mean, dtype=np.float64), clients[0].shape[1:])
    limit = None if max_rows is None else max(max_rows, *map(len, clients))
    found = GlobalRows(clients, 1 / sigma2, 1 / sigma0_2, prior, gamma, limit)
    random = seed if isinstance(seed, np.random.RandomState) else np.random.RandomState(seed)
    for j in sorted(range(len(clients)), key=lambda j: -len(clients[j])):
        found.match(j)
    for _ in range(sweeps):
        for j in random.permutation(len(clients)):
            found.match(j)
    total = np.zeros(found.g.shape)
    for rows, assignment in zip(clients, found.assignments, strict=True):
        total[assignment] += rows
    if average == "mean":
        means = total / found.counts[:, None]
    else:
        means = (found.s * total + found.s0 * prior) / (found.s0 + found.s * found.counts)[:, None]
    return LayerMatch(found.assignments, means, found.counts, sigma2, sigma0_2)


def estimate_variances(
    weights: Sequence[npt.ArrayLike], *, gamma: float = 1.0, prior_mean: npt.ArrayLike = 0.0, **options: Any
) -> dict[str, float]:
    """Return estimates, by name, of the variances `sigma2` and `sigma0_2`; arguments are those of `match_layer`.

        sigma0_2 = v,    sigma2 = v (v + e) / (v - e)

    v is the variance of clients' neurons (rows) around the prior mean, and e that of merged rows around their means.
    Merging two rows of correlation r increases the posterior if r > sigma0_2 / (sigma0_2 + sigma2); sigma2 places this
    threshold halfway between the correlations of unrelated rows (0) and of the matches (1 - e / v). First, sigma2 = v;
    then rows are matched and sigma2 is estimated in turns. Without matches at first, or if e > v / 2, it remains v.
    """
    clients = [np.asarray(rows, dtype=np.float64) for rows in weights]
    mean = np.asarray(prior_mean, dtype=np.float64)
    total = sum(rows.size for rows in clients)
    spread = sum(float(np.square(rows - mean).sum()) for rows in clients) / total
    if not spread > 0:
        return {"sigma2": 1.0, "sigma0_2": 1.0}
    sigma2 = spread
    for _ in range(ITERATIONS):
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
        previous = sigma2
        sigma2 = spread * (spread + within) / (spread - within)
        if np.isclose(sigma2, previous, rtol=1e-3):
            break
    return {"sigma2": sigma2, "sigma0_2": spread}


def _checked(weights: Sequence[npt.ArrayLike]) -> list[npt.NDArray[np.floating]]:
    clients = [np.asarray(rows) for rows in weights]
    for j, rows in enumerate(clients):
        if rows.ndim != 2 or not rows.size or rows.shape[1] != clients[0].shape[1] or not np.isfinite(rows).all():
            raise ValueError(
                f"weights[{j}] must have a row of finite numbers for each neuron of client {j} and as many columns as "
                f"weights[0] (shape {clients[0].shape}), got shape {rows.shape}: check the client's model and training"
            )
    return clients


class GlobalRows:
    """The neurons (rows) of a global layer; `assignments` has, for each client, the global row of each of its rows.

    `counts` (L,) is the number of clients' rows assigned to each global row, and `g` (L, D) is s0 * `prior`, the prior
    mean, plus s * (sum of the assigned rows), where s0 and s are inverse variances of global and clients' rows.
    """

    def __init__(
        self,
        weights: Sequence[npt.NDArray[np.floating]],
        s: float,
        s0: float,
        prior: npt.NDArray[np.float64],
        gamma: float,
        max_rows: int | None,
    ) -> None:
        self.weights = [np.asarray(rows if s == 1 else s * rows, dtype=np.float32) for rows in weights]  # s w_l
        self.s, self.s0, self.gamma, self.max_rows = s, s0, gamma, max_rows
        self.shift = (s0 * prior).astype(np.float32)
        self.g = np.empty((0, len(prior)), dtype=np.float32)
        self.counts: Ints = np.empty(0, dtype=np.intp)
        self.assignments: list[Ints] = [np.empty(0, dtype=np.intp) for _ in weights]

    def match(self, j: int) -> None:
        """Remove client j's rows from the global rows, and assign them again at the least total cost (`costs`)."""
        rows, old = self.weights[j], self.assignments[j]
        self.g[old] -= rows[: len(old)]
        self.counts[old] -= 1
        kept = self.counts > 0
        if not kept.all():
            self.g, self.counts, place = self.g[kept], self.counts[kept], np.cumsum(kept) - 1
            self.assignments = [place[assignment] for assignment in self.assignments]
        units = _assigned(self.costs(rows), len(self.counts))
        size = len(self.counts)
        new = units >= size
        opened = int(np.count_nonzero(new))
        units[new] = np.arange(size, size + opened)
        if opened:
            self.g = np.concatenate([self.g, np.tile(self.shift, (opened, 1))])
        self.g[units] += rows
        self.counts = np.pad(self.counts, (0, opened))
        self.counts[units] += 1
        self.assignments[j] = units

    def costs(self, rows: Floats) -> Floats:
        """Return the cost of assigning each of a client's `rows` (L_j, D) to each global row, then to each new row."""
        clients = len(self.weights)
        size = len(self.counts)
        s = self.s
        s0 = self.s0
        room = len(rows) if self.max_rows is None else max(min(len(rows), self.max_rows - size), len(rows) - size)
        norms, squares = (np.einsum("ld,ld->l", matrix, matrix) for matrix in (rows, self.g))
        precision = s0 + s * self.counts
        popularity = np.minimum(self.counts, MOST_POPULAR)
        # |g|^2 / (s + G) - |g|^2 / G is computed as one fraction to avoid cancellation.
        column = squares * s / (precision * (s + precision)) - np.log(popularity / (clients - popularity))
        matched = (norms[:, None] + 2 * (rows @ self.g.T)) * (-1 / (s + precision)).astype(np.float32)
        prior_value = 2 * np.log(self.gamma / clients) - self.shift @ self.shift / s0
        values = (norms + 2 * (rows @ self.shift) + self.shift @ self.shift) / (s + s0) + prior_value
        new = 2 * np.log(np.arange(1, room + 1)) - values[:, None]
        return np.concatenate([matched + column.astype(np.float32), new.astype(np.float32)], 1)


def _assigned(costs: Floats, size: int) -> Ints:
    # The column of least total costs for each row, all different. Columns from `size` on are new global rows: few are
    # offered at first, which suffices because the least total cost is convex in their number.
    from scipy.optimize import linear_sum_assignment  # imported here, because the import is slow

    offered = max(len(costs) - size, 0) + 8
    while True:
        columns: Ints = linear_sum_assignment(costs[:, : size + offered])[1]
        if np.count_nonzero(columns >= size) < offered or size + offered >= costs.shape[1]:
            return columns
        offered *= 4

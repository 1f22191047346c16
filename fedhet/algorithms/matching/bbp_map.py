"""BBP-MAP: matching of one layer's neurons among clients (Wang et al., ICLR 2020, section 2; Yurochkin et al., 2019).

A *row* has a neuron's weights. The notation is as in the papers: row l of client j, w_jl, is drawn around the global
row theta_i that it is assigned to, with variance sigma2 in every column; global rows are drawn around the prior mean mu
with variance sigma0_2. With s = 1 / sigma2 and s0 = 1 / sigma0_2, a global row that n_i clients share is described by

    g_i = s0 * mu + s * (sum of the rows assigned to it),    G_i = s0 + n_i * s,    posterior mean g_i / G_i.

The rows of client j are assigned to different global rows so that the sum of these values is maximal, with J clients:

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

_MOST_POPULAR = 10
_FIRST_OFFER = 8


@dataclass(frozen=True)
class LayerMatch:
    """The result of matching one layer.

    Attributes:
        assignments: global row of each of a client's rows (L_j,), all different, for each client.
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

    Clients are matched from the widest to the narrowest. Each sweep matches every client again, in a random order.

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
    s = 1 / sigma2
    matching = GlobalRows(
        [np.ascontiguousarray(rows if s == 1 else s * rows, dtype=np.float32) for rows in clients],
        s=s,
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
        s0 = 1 / sigma0_2
        means = (s * total + s0 * prior) / (s0 + s * counts)[:, None]
    return LayerMatch(assignments, means, counts, sigma2, sigma0_2)


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
                f"client {j}: weights must be finite and (rows, columns) with client 0's columns, got {rows.shape}"
            )
    return clients


# ---- the assignment


def assigned(cost: Floats) -> Ints:
    """Return the column assigned to each row of a cost matrix (rows, columns) so that the total cost is least."""
    from scipy.optimize import linear_sum_assignment  # imported here, because the import is slow

    return linear_sum_assignment(cost)[1]


class GlobalRows:
    """The global rows of a layer (weights of the global model's neurons), and the assignment of clients' rows to them.

    Global rows are stored in *slots*; `order` lists the used slots in the order of the rows. Products of global rows
    and clients' rows are cached until a client's row joins or leaves the slot. `weights` has the rows (L_j, D) of each
    client divided by sigma2; `max_rows` is as in `match_layer`.
    """

    def __init__(
        self,
        weights: list[Floats],
        s: float,
        s0: float,
        prior: npt.NDArray[np.float64],
        gamma: float,
        max_rows: int | None,
    ) -> None:
        self.weights, self.s, self.s0, self.max_rows = weights, s, s0, max_rows
        clients = len(weights)
        capacity = max(map(len, weights)) + clients
        self.order: Ints = np.empty(0, dtype=np.intp)
        self.slots: list[Ints] = [np.empty(0, dtype=np.intp) for _ in weights]  # (L_j,) by client
        self.g: Floats = np.empty((capacity, len(prior)), dtype=np.float32)
        self.counts: Ints = np.zeros(capacity, dtype=np.intp)
        # By client: its rows times g without the client, |g without the client|^2, and whether these are outdated.
        self.cross: list[Floats] = [np.empty((len(rows), capacity), dtype=np.float32) for rows in weights]
        self.squares: Floats = np.empty((clients, capacity), dtype=np.float32)
        self.stale = np.ones((clients, capacity), dtype=np.bool_)
        self.opened = [0] * clients  # number of new rows in each client's last assignment
        self.norms = [squares_of(rows) for rows in weights]  # |s w_l|^2
        shift = s0 * prior
        self.shift = shift.astype(np.float32)
        prior_value = 2 * np.log(gamma / clients) - shift @ shift / s0
        self.new_values = [  # by client and row: the value of the first new row
            (norms + 2 * (rows @ self.shift) + shift @ shift) / (s + s0) + prior_value
            for rows, norms in zip(weights, self.norms, strict=True)
        ]

    def run(self, sweeps: int, random: np.random.RandomState) -> None:
        """Match all clients, the widest first, and again in a random order in each of `sweeps` sweeps."""
        for j in sorted(range(len(self.weights)), key=lambda j: -len(self.weights[j])):
            self.match(j)
        for _ in range(sweeps):
            for j in random.permutation(len(self.weights)):
                self.match(j)

    def match(self, j: int) -> None:
        """Remove the rows of client j from the global rows, and match them again."""
        old = self.slots[j]
        self.counts[old] -= 1
        self.order = self.order[self.counts[self.order] > 0]
        self.refresh(j)
        columns = self.assign(j)
        opened = columns >= len(self.order)
        new = np.empty(len(columns), dtype=np.intp)
        new[~opened] = self.order[columns[~opened]]
        new[opened] = self.open(int(np.count_nonzero(opened)))
        self.move(j, old, new, opened)
        self.order = np.concatenate([self.order, new[opened]])
        self.counts[new] += 1
        self.slots[j] = new

    def refresh(self, j: int) -> None:
        """Update the cached products of client j's rows and the global rows without its contribution."""
        slots = self.order[self.stale[j, self.order]]
        row = np.full(len(self.g), -1)
        row[self.slots[j]] = np.arange(len(self.slots[j]))
        shared = row[slots] >= 0
        slots = np.concatenate([slots[shared], slots[~shared]])
        others = self.g[slots]
        local = slots[: np.count_nonzero(shared)]
        others[: len(local)] -= self.weights[j][row[local]]
        self.cross[j][:, slots] = self.weights[j] @ others.T
        self.squares[j, slots] = squares_of(others)
        self.stale[j, slots] = False

    def assign(self, j: int) -> Ints:
        """Return the optimal assignment of client j's rows, as indices into the global rows followed by new rows.

        The number of new rows is increased until some are not used, since the best total is concave in their number.
        """
        rows, size = len(self.weights[j]), len(self.order)
        if not size:
            return np.arange(rows)
        room = rows if self.max_rows is None else max(min(rows, self.max_rows - size), rows - size)
        offered = min(room, max(rows - size, 0) + 2 * self.opened[j] + _FIRST_OFFER)
        while True:
            columns = assigned(self.costs(j, offered))
            self.opened[j] = int(np.count_nonzero(columns >= size))
            if self.opened[j] < offered or offered == room:
                return columns
            offered = min(room, 4 * offered)

    def costs(self, j: int, offered: int) -> Floats:
        """Return the costs (L_j, L + offered) of assigning client j's rows to L global rows and `offered` new rows."""
        size, s = len(self.order), self.s
        cost = np.empty((len(self.weights[j]), size + offered), dtype=np.float32)
        matched, new = cost[:, :size], cost[:, size:]
        squares, counts = self.squares[j, self.order], self.counts[self.order]
        precision, popularity = self.s0 + s * counts, np.minimum(counts, _MOST_POPULAR)
        # |g|^2 / (s + G) - |g|^2 / G is computed as one fraction to avoid cancellation.
        column = squares * s / (precision * (s + precision)) - np.log(popularity / (len(self.weights) - popularity))
        matched[:] = np.take(self.cross[j], self.order, axis=1)
        matched *= 2
        matched += self.norms[j][:, None]
        matched *= (-1 / (s + precision)).astype(np.float32)
        matched += column.astype(np.float32)
        new[:] = 2 * np.log(np.arange(1, offered + 1, dtype=np.float32))
        new -= self.new_values[j].astype(np.float32)[:, None]
        return cost

    def open(self, number: int) -> Ints:
        """Return `number` free slots; allocate more slots if there are too few."""
        free = np.flatnonzero(self.counts == 0)
        if len(free) < number:
            more = max(number - len(free), len(self.counts) // 4)
            self.g = np.pad(self.g, ((0, more), (0, 0)))
            self.counts = np.pad(self.counts, (0, more))
            self.cross = [np.pad(cross, ((0, 0), (0, more))) for cross in self.cross]
            self.squares = np.pad(self.squares, ((0, 0), (0, more)))
            self.stale = np.pad(self.stale, ((0, 0), (0, more)), constant_values=True)
            free = np.flatnonzero(self.counts == 0)
        return free[:number]

    def move(self, j: int, old: Ints, new: Ints, opened: npt.NDArray[np.bool_]) -> None:
        """Move the rows of client j from their old slots to their new slots; `opened` marks slots of new rows."""
        weights = self.weights[j]
        moved = old != new if len(old) else np.ones(len(new), dtype=np.bool_)
        joined = moved & ~opened
        if len(old):
            self.g[old[moved]] -= weights[moved]
        self.g[new[opened]] = self.shift + weights[opened]
        self.g[new[joined]] += weights[joined]
        touched = new[moved] if not len(old) else np.concatenate([old[moved], new[moved]])
        others = np.arange(len(self.weights)) != j
        self.stale[np.ix_(others, touched)] = True

    def result(self) -> tuple[list[Ints], Ints]:
        """Return the global row of each row of each client, and the number of clients per global row."""
        position = np.empty(len(self.counts), dtype=np.intp)
        position[self.order] = np.arange(len(self.order))
        return [position[slots] for slots in self.slots], self.counts[self.order]


def squares_of(rows: Floats) -> Floats:
    """Return the squared norm (L,) of each row."""
    squares: Floats = np.einsum("ld,ld->l", rows, rows)
    return squares

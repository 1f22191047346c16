"""BBP-MAP: matching the neurons of one layer among clients (Wang et al., ICLR 2020, section 2; Yurochkin et al., 2019).

Notation as in the papers. Row l of client j, w_jl, is a draw around the global row theta_i that it is assigned to,
with variance sigma2 in every column; global rows are draws around the prior mean mu with variance sigma0_2. With
s = 1 / sigma2 and s0 = 1 / sigma0_2, a global row that n clients share is described by

    g_i = s0 * mu + s * (sum of the rows assigned to it),    G_i = s0 + n_i * s,    posterior mean g_i / G_i.

Client j's rows are assigned, all at once and to different global rows, so that the total of these values is largest:

    an existing row i:   |s w_l + g_i|^2 / (s + G_i) - |g_i|^2 / G_i + log(c_i / (J - c_i)),   c_i = min(n_i, 10)
    the k-th new row:    |s w_l + s0 mu|^2 / (s + s0) - |s0 mu|^2 / s0 - 2 log k + 2 log(gamma / J)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .solvers import Solver, get_solver

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.intp]

_MOST_POPULAR = 10
_REFERENCE_ROWS = 700
_FIRST_OFFER = 8


@dataclass(frozen=True)
class LayerMatch:
    """What came of matching one layer.

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
    solver: str = "scipy",
    reference_compatible: bool = False,
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
        solver: The assignment solver, one of `fedhet.matching.SOLVERS`.
        reference_compatible: Open at most max(700 - L, 1) new rows a match, as FedMA's reference code does; though
            never so few that a local row would go without.

    Returns:
        The assignments, the global rows and their counts.

    Raises:
        ValueError: Weights or options make no sense; the message names the client.
        ImportError: The solver is not installed.
    """
    clients = _checked_weights(weights)
    prior = _checked_prior(prior_mean, clients[0].shape[1])
    _check_options(sigma2, sigma0_2, gamma, sweeps, average, max_rows)
    widest = max(len(rows) for rows in clients)
    matching = _Matching(
        [_scaled(rows, 1 / sigma2) for rows in clients],
        s=1 / sigma2,
        s0=1 / sigma0_2,
        prior=prior,
        gamma=gamma,
        solve=get_solver(solver),
        max_rows=None if max_rows is None else max(max_rows, widest),
        cap=_REFERENCE_ROWS if reference_compatible else None,
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
    solver: str = "scipy",
) -> Ints:
    """Assigns the rows of a client that came late to the frozen global rows of a match.

    One assignment; no row is opened and the global rows stay what they are.

    Args:
        weights: (L, D), the client's rows.
        match: The match that the other clients took part in.
        prior_mean: As in that match.
        average: As in that match.
        solver: The assignment solver, one of `fedhet.matching.SOLVERS`.

    Returns:
        (L,) ints, the global row of each of the client's rows, none twice.

    Raises:
        ValueError: The client has more rows than the match, another number of columns, or values that are not finite.
        ImportError: The solver is not installed.
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
    scaled, frozen = _scaled(rows, s), g.astype(np.float32)
    cost = scaled @ frozen.T
    _to_cost(cost, _squares(scaled), _squares(frozen), counts, len(match.assignments) + 1, s, s0)
    return get_solver(solver)(cost)


@dataclass
class _Matching:
    """The state of one matching.

    A global row lives in a *slot*, which it keeps; `order` lists the slots in use as the global order. So a row that
    dies renumbers nobody, and what was computed about a slot stays valid until a client joins or leaves it.
    """

    weights: list[Floats]  # s times the clients' rows
    s: float
    s0: float
    prior: npt.NDArray[np.float64]
    gamma: float
    solve: Solver
    max_rows: int | None
    cap: int | None

    order: Ints = field(init=False)
    slots: list[Ints] = field(init=False)  # the slot of each local row, by client
    g: Floats = field(init=False)  # (capacity, D)
    counts: Ints = field(init=False)  # (capacity,)
    cross: list[Floats] = field(init=False)  # (L_j, capacity) by client: its rows times g without the client
    squares: Floats = field(init=False)  # (J, capacity): |g without the client|^2
    stale: npt.NDArray[np.bool_] = field(init=False)  # (J, capacity): cross and squares are out of date
    opened: list[int] = field(init=False)  # the rows that each client opened last
    shift: Floats = field(init=False)  # (D,): s0 mu
    norms: list[Floats] = field(init=False)  # (L_j,) by client: |s w_l|^2
    new_values: list[npt.NDArray[np.float64]] = field(init=False)  # (L_j,) by client: value of the first new row

    def __post_init__(self) -> None:
        """Starts without any global row."""
        widths = [len(rows) for rows in self.weights]
        capacity, columns = max(widths) + len(widths), self.weights[0].shape[1]
        self.order = np.empty(0, dtype=np.intp)
        self.slots = [np.empty(0, dtype=np.intp) for _ in widths]
        self.g = np.empty((capacity, columns), dtype=np.float32)
        self.counts = np.zeros(capacity, dtype=np.intp)
        self.cross = [np.empty((width, capacity), dtype=np.float32) for width in widths]
        self.squares = np.empty((len(widths), capacity), dtype=np.float32)
        self.stale = np.ones((len(widths), capacity), dtype=np.bool_)
        self.opened = [0] * len(widths)
        self.norms = [_squares(rows) for rows in self.weights]
        shift = self.s0 * self.prior
        self.shift = shift.astype(np.float32)
        prior_value = 2 * np.log(self.gamma / len(widths)) - shift @ shift / self.s0
        self.new_values = [
            (norms + 2 * (rows @ self.shift) + shift @ shift) / (self.s + self.s0) + prior_value
            for rows, norms in zip(self.weights, self.norms, strict=True)
        ]

    def run(self, sweeps: int, random: np.random.RandomState) -> None:
        """Matches every client once in order of width, then in each sweep in a random order."""
        for j in sorted(range(len(self.weights)), key=lambda j: -len(self.weights[j])):
            self.match(j)
        for _ in range(sweeps):
            for j in random.permutation(len(self.weights)):
                self.match(j)

    def match(self, j: int) -> None:
        """Takes client j out of the global rows and assigns it again."""
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
        """Brings client j's products with the global rows, without itself, up to date."""
        slots = self.order[self.stale[j, self.order]]
        row = np.full(len(self.g), -1)
        row[self.slots[j]] = np.arange(len(self.slots[j]))
        shared = row[slots] >= 0
        slots = np.concatenate([slots[shared], slots[~shared]])
        others = self.g[slots]
        own = slots[: np.count_nonzero(shared)]
        others[: len(own)] -= self.weights[j][row[own]]
        self.cross[j][:, slots] = self.weights[j] @ others.T
        self.squares[j, slots] = _squares(others)
        self.stale[j, slots] = False

    def assign(self, j: int) -> Ints:
        """The column of each of client j's rows: global rows in order, then new ones.

        The best total is concave in the number of rows opened (an assignment is a flow of least cost, and -2 log k
        falls), so that a solution which leaves one of the new rows offered unused would not use more of them either.
        Hence few are offered first.
        """
        rows, size = len(self.weights[j]), len(self.order)
        if not size:
            return np.arange(rows)
        room = rows
        if self.cap is not None:
            room = min(room, max(self.cap - size, 1))
        if self.max_rows is not None:
            room = min(room, self.max_rows - size)
        room = max(room, rows - size)
        offered = min(room, max(rows - size, 0) + 2 * self.opened[j] + _FIRST_OFFER)
        while True:
            columns = self.solve(self.costs(j, offered))
            self.opened[j] = int(np.count_nonzero(columns >= size))
            if self.opened[j] < offered or offered == room:
                return columns
            offered = min(room, 4 * offered)

    def costs(self, j: int, offered: int) -> Floats:
        """(L_j, L + offered), what the solver minimises for client j if so many new rows are offered."""
        size = len(self.order)
        cost = np.empty((len(self.weights[j]), size + offered), dtype=np.float32)
        matched, new = cost[:, :size], cost[:, size:]
        matched[:] = np.take(self.cross[j], self.order, axis=1)
        squares, counts = self.squares[j, self.order], self.counts[self.order]
        _to_cost(matched, self.norms[j], squares, counts, len(self.weights), self.s, self.s0)
        new[:] = 2 * np.log(np.arange(1, offered + 1, dtype=np.float32))
        new -= self.new_values[j].astype(np.float32)[:, None]
        return cost

    def open(self, number: int) -> Ints:
        """Returns as many free slots, making room for them where there is none."""
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
        """Moves client j's rows from their old slots to their new ones."""
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
        """The assignments in the global order, and the counts."""
        position = np.empty(len(self.counts), dtype=np.intp)
        position[self.order] = np.arange(len(self.order))
        return [position[slots] for slots in self.slots], self.counts[self.order]


def _to_cost(cross: Floats, norms: Floats, squares: Floats, counts: Ints, clients: int, s: float, s0: float) -> None:
    """Turns the products of s w_l and g_i, (L_j, L), into costs: minus the value of each local row in each global one.

    |g|^2 / (s + G) - |g|^2 / G is written as one fraction, so that nothing cancels.
    """
    precision = s0 + s * counts
    popularity = np.minimum(counts, _MOST_POPULAR)
    column = squares * s / (precision * (s + precision)) - np.log(popularity / (clients - popularity))
    scale = (-1 / (s + precision)).astype(np.float32)
    cross *= 2
    cross += norms[:, None]
    cross *= scale
    cross += column.astype(np.float32)


def _scaled(rows: npt.NDArray[np.floating], s: float) -> Floats:
    scaled = rows if s == 1 else s * rows
    return np.ascontiguousarray(scaled, dtype=np.float32)


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


def _squares(rows: Floats) -> Floats:
    squares: Floats = np.einsum("ld,ld->l", rows, rows)
    return squares


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

"""Linear assignment solvers by name."""

from collections.abc import Callable
from importlib import import_module

import numpy as np
import numpy.typing as npt

Solver = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.intp]]

_HOW_TO_GET = {
    "lapsolver": "`pip install lapsolver` (it does not build on Python 3.11 or newer, so not where Flower runs)",
    "lapx": "`pip install 'fedhet[lapx]'`",
}


def get_solver(name: str) -> Solver:
    """Returns the assignment solver called `name`.

    Args:
        name: One of `SOLVERS`: `scipy`, which is always there, or `lapsolver` (which FedMA's authors used) or `lapx`,
            where they are installed.

    Returns:
        A function from a finite float32 cost matrix (rows, columns), with no more rows than columns, to the
        column of each row (rows,) in an assignment of least total cost.

    Raises:
        ValueError: No solver has this name.
        ImportError: The package behind it is not installed.
    """
    if name not in SOLVERS:
        raise ValueError(f"unknown assignment solver {name!r}: choose one of {', '.join(SOLVERS)}")
    return SOLVERS[name]()


def _scipy() -> Solver:
    from scipy.optimize import linear_sum_assignment

    return lambda cost: linear_sum_assignment(cost)[1]


def _lapsolver() -> Solver:
    solve_dense = _import("lapsolver", "lapsolver").solve_dense
    return lambda cost: np.asarray(solve_dense(cost)[1], dtype=np.intp)


def _lapx() -> Solver:
    lapjv = _import("lap", "lapx").lapjv
    return lambda cost: np.asarray(lapjv(cost, extend_cost=True)[1], dtype=np.intp)


def _import(module: str, solver: str):  # type: ignore[no-untyped-def]  # optional modules carry no types
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f"the assignment solver {solver!r} is not installed: {_HOW_TO_GET[solver]}, or choose solver='scipy'"
        ) from error


SOLVERS: dict[str, Callable[[], Solver]] = {"scipy": _scipy, "lapsolver": _lapsolver, "lapx": _lapx}

"""Reads parts of a request; one that cannot be used is refused."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from fedhet.wire import Arrays, WireError, to_tensor


@contextmanager
def reading_request(what: str) -> Iterator[None]:
    """Within it, what is wrong with a part of a request is a refusal of that request.

    Raises:
        WireError: the part cannot be used, and why.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError) as error:
        raise WireError(f"the server's request is damaged: its {what} cannot be used: {error}") from error


def rows_in(arrays: Arrays, of: Tensor, what: str) -> Tensor:
    """The examples at the rows that the server names, `(n, ...)`.

    Raises:
        WireError: they are no rows of these examples.
    """
    with reading_request(what):
        rows = arrays["rows"]
        if rows.dtype.kind not in "iu" or rows.ndim != 1 or not 0 < len(rows) <= len(of):
            raise ValueError(f"rows are {rows.dtype}{list(rows.shape)}, of {len(of)} examples")
        if rows.min() < 0 or rows.max() >= len(of):
            raise ValueError(f"rows are from {rows.min()} to {rows.max()}, of {len(of)} examples")
        return of[to_tensor(rows).long()]


def check_rows(part: Tensor, count: int) -> None:
    """Check that a part of a request is of so many examples.

    Raises:
        ValueError: it is of another number.
    """
    if len(part) != count:
        raise ValueError(f"it is of {len(part)} examples, must be of {count}")

"""Reads parts of a request; one that cannot be used is refused."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from fedhet.wire import Arrays, WireError, to_tensor


@contextmanager
def reading_request(what: str) -> Iterator[None]:
    """Turn errors about a part of a request into a WireError that says so."""
    try:
        yield
    except (ValueError, LookupError, TypeError) as error:
        raise WireError(f"the server's request is damaged: its {what} cannot be used: {error}") from error


def rows_in(arrays: Arrays, of: Tensor, what: str) -> Tensor:
    """The examples (n, ...) at the rows that the server names; raises WireError for rows that there are not."""
    with reading_request(what):
        rows = arrays["rows"]
        if rows.dtype.kind not in "iu" or rows.ndim != 1 or not 0 < len(rows) <= len(of):
            raise ValueError(f"rows are {rows.dtype}{list(rows.shape)}, of {len(of)} examples")
        if rows.min() < 0 or rows.max() >= len(of):
            raise ValueError(f"rows are from {rows.min()} to {rows.max()}, of {len(of)} examples")
        return of[to_tensor(rows).long()]


def check_rows(part: Tensor, count: int) -> None:
    """Raise ValueError unless a part of a request is of so many examples."""
    if len(part) != count:
        raise ValueError(f"it is of {len(part)} examples, must be of {count}")

"""Reads parts of a request, and refuses those that cannot be used."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from fedhet.messages import Arrays, WireError, to_tensor


@contextmanager
def reading_request(name: str) -> Iterator[None]:
    """Turn errors about a part of a request into a WireError that names it."""
    try:
        yield
    except (ValueError, LookupError, TypeError) as error:
        raise WireError(f"the server's request is damaged: its {name} cannot be used: {error}") from error


@dataclass(frozen=True)
class PublicRows:
    """Rows of the public dataset; each is an example or one token of an example.

    Attributes:
        inputs: (n, ...) raw examples.
        tokens: (n,) int64, the token of each row; None if rows are examples.
    """

    inputs: Tensor
    tokens: Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs)


def rows_in(arrays: Arrays, of: Tensor, name: str, *, tokens: int = 1) -> PublicRows:
    """Return the rows of `of` (n, ...) whose numbers the server sent; raises a WireError for numbers out of range.

    If examples have `tokens` tokens each, row r is token r % tokens of example r // tokens.
    """
    with reading_request(name):
        rows, count = arrays["rows"], len(of) * tokens
        if rows.dtype.kind not in "iu" or rows.ndim != 1 or not 0 < len(rows) <= count:
            raise ValueError(f"rows are {rows.dtype}{list(rows.shape)}, expected 1 to {count} whole numbers")
        if rows.min() < 0 or rows.max() >= count:
            raise ValueError(f"rows are from {rows.min()} to {rows.max()}, expected 0 to {count - 1}")
        return row_tokens(to_tensor(rows).long().to(of.device), of, tokens)


def row_tokens(rows: Tensor, of: Tensor, tokens: int) -> PublicRows:
    """Return the rows (n,) int64 of examples that have `tokens` tokens each."""
    return PublicRows(of[rows]) if tokens == 1 else PublicRows(of[rows // tokens], rows % tokens)


def check_rows(part: Tensor, count: int) -> None:
    """Raise ValueError unless a part of a request has `count` rows."""
    if len(part) != count:
        raise ValueError(f"it has {len(part)} rows, expected {count}")

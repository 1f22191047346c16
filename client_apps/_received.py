"""Reads the parts of a server's request, and raises a WireError for parts that cannot be used."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from fedhet.messages import Arrays, WireError, to_tensor


@contextmanager
def reading_request(name: str) -> Iterator[None]:
    """Turn errors within the context into a WireError that names a part of the server's request."""
    try:
        yield
    except (ValueError, LookupError, TypeError) as error:
        raise WireError(f"the server's request is damaged: its {name} cannot be used: {error}") from error


@dataclass(frozen=True)
class PublicRows:
    """Rows of the public dataset; a row is an example, or one token of an example.

    `inputs` (n, ...) has the raw example of each row, and `tokens` (n,) int64 the position of its token.
    """

    inputs: Tensor
    tokens: Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs)


def rows_in(arrays: Arrays, of: Tensor, name: str, *, tokens: int = 1) -> PublicRows:
    """Return the rows of the examples `of` (n, ...) that a request selects; raises a WireError for invalid numbers.

    If each example has `tokens` tokens, row r is token r % tokens of example r // tokens. `name` is for messages.
    """
    with reading_request(name):
        rows, count = arrays["rows"], len(of) * tokens
        if rows.dtype.kind not in "iu" or rows.ndim != 1 or not 0 < len(rows) <= count:
            raise ValueError(
                f"rows have dtype {rows.dtype} and shape {list(rows.shape)}, expected 1 to {count} integers"
            )
        if rows.min() < 0 or rows.max() >= count:
            raise ValueError(f"row numbers are from {rows.min()} to {rows.max()}, expected 0 to {count - 1}")
        return row_tokens(to_tensor(rows).long().to(of.device), of, tokens)


def row_tokens(rows: Tensor, of: Tensor, tokens: int) -> PublicRows:
    """Return the rows with numbers `rows` (n,) int64 of the examples `of`, which have `tokens` tokens each."""
    return PublicRows(of[rows]) if tokens == 1 else PublicRows(of[rows // tokens], rows % tokens)


def check_rows(part: Tensor, count: int) -> None:
    """Raise a ValueError unless `part`, a part of a request, has `count` rows."""
    if len(part) != count:
        raise ValueError(f"it has {len(part)} rows, expected {count}")

"""The files of a run that grow by the round, with their digests: a resumed run goes on from what was recorded."""

import csv
import hashlib
from collections.abc import Mapping
from pathlib import Path

from fedhet.errors import FedhetError
from fedhet.files import csv_lines, write_text

FILES = ("history.jsonl", "clients.csv")
DIGESTS = "digests.csv"


class Appended:
    """Writes `history.jsonl` and `clients.csv`, and in `digests.csv` the digests of both after every round."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._content = {name: _digest(b"") for name in FILES}

    def begin(self, columns: list[str]) -> None:
        """Make the files: without rounds, and with the columns of `clients.csv`."""
        self._write({FILES[0]: b"", FILES[1]: csv_lines([columns]).encode()}, {})

    def append(self, name: str, text: str) -> None:
        """Append lines to a file."""
        _append(self._folder / name, text)
        self._content[name].update(text.encode())

    def record(self, round: int) -> None:
        """Note the digests after a round."""
        _append(self._folder / DIGESTS, csv_lines([[round, *(self._content[name].hexdigest() for name in FILES)]]))

    def go_back(self, last: int, lines: Mapping[str, int]) -> None:
        """Cut the files back to as many lines as they had after a round.

        Raises:
            FedhetError: a file does not hold what was recorded; nothing was cut.
        """
        texts = {name: b"".join(_lines(self._folder / name)[:number]) for name, number in lines.items()}
        recorded = {round: digests for round, digests in self._recorded().items() if round <= last}
        for name, text in texts.items():
            if recorded.get(last, {}).get(name) != _digest(text).hexdigest():
                raise FedhetError(
                    f"{self._folder / name} is damaged: up to round {last} it is not what {DIGESTS} says was recorded, "
                    "so the run cannot go on from it; restore the folder from a copy, or run it again"
                )
        self._write(texts, recorded)

    def _write(self, texts: Mapping[str, bytes], recorded: Mapping[int, Mapping[str, str]]) -> None:
        rows = [[round, *digests.values()] for round, digests in recorded.items()]
        write_text(self._folder / DIGESTS, csv_lines([["round", *FILES], *rows]))
        for name, text in texts.items():
            write_text(self._folder / name, text.decode())
            self._content[name] = _digest(text)

    def _recorded(self) -> dict[int, dict[str, str]]:
        """The digests of each file, by round."""
        rows = csv.reader(line.decode(errors="replace") for line in _lines(self._folder / DIGESTS)[1:])
        whole = [row for row in rows if len(row) == 1 + len(FILES) and row[0].isdecimal()]
        return {int(round): dict(zip(FILES, digests, strict=True)) for round, *digests in whole}


def _lines(path: Path) -> list[bytes]:
    """The lines of a file, each with its end; none of a file that is missing."""
    return path.read_bytes().splitlines(keepends=True) if path.is_file() else []


def _digest(text: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(text, digest_size=16)


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(text)

"""What a run of a program gave, and comparisons of two outcomes."""

import csv
import itertools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import fedhet
from fedhet.errors import FedhetError
from fedhet.results.history import read_history
from tests.relations.programs import Program

_number = itertools.count()
COMPARED = ("participants", "received", "trained", "common", "train_loss")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: the message with which it was refused, or its numbers and models.

    Attributes:
        refused: the error message, or an empty string.
        folder: the run directory.
        clients: accuracy and loss of each client's last evaluation, by the client's name.
        models: arrays by file and name.
        history: numbers of the rounds.
        log: warnings and errors in the log.
        failures: reasons for which clients failed, with the clients' names.
    """

    refused: str = ""
    folder: Path = Path()
    clients: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, np.ndarray[Any, Any]]] = field(default_factory=dict)
    history: tuple[Any, ...] = ()
    log: str = ""
    failures: tuple[tuple[str, str], ...] = ()


class Keeping(logging.Handler):
    """A log handler that keeps messages."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert not record.exc_info, f"a traceback in the log: {record.getMessage()}"
        self.messages.append(record.getMessage())


@contextmanager
def kept_log() -> Iterator[list[str]]:
    """Keep the messages of the log."""
    handler, logger = Keeping(), logging.getLogger("flwr")
    logger.addHandler(handler)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)


def new(folder: Path) -> Path:
    """Return a new path in `folder`."""
    return folder / f"run-{next(_number)}"


def run(program: Program, folder: Path, **arguments: Any) -> Outcome:
    """Run a program; any exception but a `FedhetError` is a fault."""
    out = arguments.pop("out", None) or new(folder)
    with kept_log() as messages:
        try:
            fedhet.run(program.all_settings, **program.arguments(), out=out, progress=False, **arguments)
        except FedhetError as error:
            assert "Traceback" not in str(error)  # noqa: PT017 - other exceptions are faults, too
            return Outcome(refused=str(error), folder=out)
    return read(out, "\n".join(messages))


def read(out: Path, log: str = "") -> Outcome:
    """Read a run directory."""
    with (out / "clients.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        metric = [*(reader.fieldnames or ())][4]
        rows = [row for row in reader if row[metric]]
    clients = {row["client"]: (float(row[metric]), float(row["loss"] or "nan")) for row in rows}
    models = {
        path.relative_to(out).as_posix(): load_file(path) for path in sorted((out / "models").rglob("*.safetensors"))
    }
    history = read_history(out)
    failures = sorted({(failure["client"], failure["reason"]) for row in history for failure in row["failures"]})
    numbers = tuple({key: row.get(key) for key in COMPARED} for row in history)
    return Outcome(folder=out, clients=clients, models=models, history=numbers, log=log, failures=tuple(failures))


def alike(one: Outcome, other: Outcome) -> None:
    """Check that both runs were refused, or neither."""
    assert not other.refused or one.refused, f"only this run was refused: {other.refused}"
    assert not one.refused or other.refused, f"only the other run was refused: {one.refused}"


def equal(one: Outcome, other: Outcome) -> None:
    """Check that two outcomes are equal to the last bit."""
    alike(one, other)
    assert other.failures == one.failures
    assert dict(other.clients) == dict(one.clients)
    assert other.models.keys() == one.models.keys()
    for name, arrays in one.models.items():
        assert other.models[name].keys() == arrays.keys()
        differing = [key for key, array in arrays.items() if other.models[name][key].tobytes() != array.tobytes()]
        assert not differing, f"{name} differs in {differing}"
    assert other.history == one.history


def close(
    one: Outcome,
    other: Outcome,
    names: Mapping[str, str] | None = None,
    *,
    models: bool = True,
    tolerance: float = 1e-6,
) -> None:
    """Check that two outcomes are equal up to rounding in float64; `names` maps client names of `one` to `other`'s."""
    alike(one, other)
    names = names or {client: client for client in one.clients}
    assert set(other.clients) == {names[client] for client in one.clients}
    for client, numbers in one.clients.items():
        np.testing.assert_allclose(
            other.clients[names[client]], numbers, rtol=10 * tolerance, atol=tolerance, err_msg=f"client {client}"
        )
    for name, arrays in one.models.items() if models else ():
        stem = Path(name).stem
        twin = name.replace(f"{stem}.safetensors", f"{names.get(stem, stem)}.safetensors")
        for key, array in arrays.items():
            if array.dtype.kind == "f":
                np.testing.assert_allclose(
                    other.models[twin][key], array, rtol=1e-5, atol=1e-7, err_msg=f"{name} {key}"
                )

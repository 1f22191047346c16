"""Files that are written whole or not at all: text, tables as CSV, and arrays as safetensors."""

import contextlib
import csv
import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet.errors import ConfigError, FedhetError

if TYPE_CHECKING:
    import numpy as np
    import torch

LOCK = ".lock"
"""The file by which a folder is kept for one process."""


def plain_name(text: str) -> bool:
    """Whether text can be the name of a file or folder in any folder, and leads nowhere else."""
    return 0 < len(text) <= 200 and text.isprintable() and text not in (".", "..") and not {*text} & {*"/\\:"}


def check_place(folder: Path) -> None:
    """Find out whether a folder is there or can be made, and can be written to.

    Raises:
        ConfigError: it cannot; nothing was made.
    """
    try:
        there = next(each for each in (folder, *folder.parents) if each.exists() or each.is_symlink())
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{folder} cannot be a folder to write to: {reason}; choose another one") from error


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have a file written beside its place, and put it there when it is complete; the folder is made if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    write(temporary)
    os.replace(temporary, path)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Keep a folder, made if missing, for this process alone, until the process ends in whatever way.

    Args:
        folder: the folder.
        wait: for a process that has it.

    Raises:
        ConfigError: another process has it (without `wait`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        yield
        return
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            raise ConfigError(
                f"{folder} is in use by another run: wait for its end, or choose another folder"
            ) from error
        yield


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, whole or not at all."""
    write_whole(path, lambda temporary: temporary.write_bytes(text.encode()))


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Write rows as CSV, whole or not at all; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_text(path, text.getvalue())


def write_arrays(
    path: Path, arrays: "Mapping[str, np.ndarray[Any, Any]]", *, metadata: dict[str, str] | None = None
) -> None:
    """Write arrays, and text beside them, to a safetensors file, whole or not at all."""
    import numpy as np
    from safetensors.numpy import save_file

    contiguous = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    write_whole(path, lambda temporary: save_file(contiguous, temporary, metadata=metadata))


def write_tensors(path: Path, tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Write tensors to a safetensors file, whole or not at all; tensors that share memory are written apart.

    Returns:
        Copies, as reading the file would give them.
    """
    from safetensors.torch import save_file

    apart = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_whole(path, lambda temporary: save_file(apart, temporary))
    return apart


def read_tensors(path: Path) -> "dict[str, torch.Tensor] | None":
    """The tensors of a safetensors file, or None where there is no such file.

    Raises:
        FedhetError: the file is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        return None
    try:
        return load_file(path)
    except SafetensorError as error:
        raise FedhetError(f"{path} is damaged: {error}") from error


def state_home() -> Path:
    """Where clients without a `state-dir` keep their state, in a folder for each run."""
    return Path.home() / ".fedhet" / "state"

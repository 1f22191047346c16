"""Atomic writing of text, CSV tables and safetensors files; checks and locks of folders."""

import contextlib
import csv
import errno
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet.errors import ConfigError, FedhetError, WriteError, damage
from fedhet.utils.text import cell

if TYPE_CHECKING:
    import numpy as np
    import torch

LOCK = ".lock"  # name of the file that locks a folder for one process
SEAL = "fedhet"  # key of a safetensors file's metadata for its digest and text
NAMES = "names"  # key of the metadata for names of a network's classes and columns, in its order
PACKED = "packed"  # name of the array, and key of the metadata, of tensors that are written as one array
LONGEST_NAME = 200  # largest number of bytes of a client's name; names of files have up to 255, with endings
# Device names that Windows reserves, with any ending.
DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]|conin\$|conout\$)(\.|$)", re.IGNORECASE)
# Names that fedhet uses itself in folders of states and models.
TAKEN_NAMES = frozenset(
    {"beginning", "cache", "clients", "models", "nodes", "public", "global", "account.json", "audit.jsonl"}
)


def plain_name(text: str) -> bool:
    """Return whether a text can name a client's file on any file system and is not a name that fedhet uses itself."""
    return (
        text.isprintable()
        and 0 < len(file_name(text).encode()) <= LONGEST_NAME
        and text == text.strip()
        and not text.startswith(".")
        and not {*text} & {*"/\\:"}
        and text.casefold() not in TAKEN_NAMES
    )


def file_name(name: str) -> str:
    """Return the name of a client's file or folder, which is valid on any system; `unquote` is the inverse function.

    Characters and names that Windows reserves are escaped as in a URL: `a?b` is `a%3Fb`, `con` is `%63on`.
    """
    escaped = re.sub(r'[%<>"|?*]|\.$', lambda found: f"%{ord(found[0]):02X}", name)
    return f"%{ord(name[0]):02X}{name[1:]}" if DEVICES.match(escaped) else escaped


def check_links(folder: Path, root: Path | None = None) -> None:
    """Check that no link in `folder` points outside `root`, by default `folder`; raise a ConfigError otherwise."""
    # Such links in a folder of unknown origin could make a run write or remove other files.
    root = (root or folder).resolve()
    below = (Path(place, name) for place, *names in os.walk(folder) for name in (*names[0], *names[1]))
    for path in chain([folder], below):
        if path.is_symlink() and not (target := Path(os.path.realpath(path))).is_relative_to(root):
            raise ConfigError(
                f"{path} is a link to {target}, outside of {root}: replace the link by the file or folder itself"
            )
        if path.exists() and not (path.is_file() or path.is_dir()):  # reading a pipe or a device may never end
            raise ConfigError(f"{path} is neither a file nor a folder: remove it")


def check_place(folder: Path) -> None:
    """Check that a folder exists and is writable, or can be created; raise a ConfigError otherwise."""
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folder.lstat()  # raises an OSError for a name that is too long; `exists` does not
        there = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{folder} cannot be written to ({reason}): choose another folder") from error


@contextlib.contextmanager
def private_files(really: bool = True) -> Iterator[None]:
    """Context manager in which this process creates files and folders that only its user can read, if `really`."""
    before = os.umask(0o077) if really else None
    try:
        yield
    finally:
        if before is not None:
            os.umask(before)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: call `write` with a temporary path, then rename that file; creates a missing folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            os.replace(temporary, path)
    except Exception:  # what a full disk has of it only takes room
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context manager in which an OSError becomes a WriteError that names the file `path`."""
    try:
        yield
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(path)) from error


def _save(
    save: "Callable[..., bytes]",
    path: Path,
    arrays: "Mapping[str, np.ndarray[Any, Any] | torch.Tensor]",
    text: Mapping[str, str],
) -> None:
    # With the digest as one entry, since safetensors writes several in random order.
    metadata = {SEAL: json.dumps({**text, "digest": _digest(arrays, text)})}
    content = save(arrays, metadata)  # which takes less time than save_file
    write_whole(path, lambda temporary: temporary.write_bytes(content))


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Context manager that creates a folder if it is missing, and locks it for this process.

    If another process has locked it, wait for that process if `wait` is True, or raise a ConfigError.
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
            raise ConfigError(f"{folder} is in use by another run: wait, or choose another folder") from error
        try:
            yield
        finally:  # closing the file does not unlock it if a process that was forked meanwhile has it open, too
            fcntl.flock(file, fcntl.LOCK_UN)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    write_whole(path, lambda temporary: temporary.write_bytes(text.encode()))


def csv_lines(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as text in CSV format; None becomes an empty cell, and text that looks like a formula is escaped."""
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows(map(cell, row) for row in rows)
    return lines.getvalue()


def write_arrays(
    path: Path, arrays: "Mapping[str, np.ndarray[Any, Any]]", *, metadata: dict[str, str] | None = None
) -> None:
    """Write arrays by name and `metadata` atomically to a safetensors file, with a digest of their content."""
    import numpy as np
    from safetensors.numpy import save

    contiguous = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    _save(save, path, contiguous, metadata or {})


def read_arrays(path: Path) -> "tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]":
    """Return a safetensors file's arrays by name, and its metadata; raises a FedhetError if missing or damaged."""
    return read_safetensors(path, "numpy")


def write_tensors(path: Path, tensors: "Mapping[str, torch.Tensor]", *, packed: bool = False, names: str = "") -> None:
    """Write tensors, and `names` of classes and columns, atomically to a safetensors file with a digest of its content.

    If `packed`, the file has the bytes of all tensors as one array, which takes half the time for small tensors.
    """
    import torch
    from safetensors.torch import save

    from fedhet.utils.inputs import as_bytes

    if packed:
        content = [as_bytes(tensor) for tensor in tensors.values()]
        kinds = {name: (str(each.dtype).removeprefix("torch."), [*each.shape]) for name, each in tensors.items()}
        return _save(save, path, {PACKED: torch.cat(content)}, {PACKED: json.dumps(kinds)})
    apart = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    _save(save, path, apart, {NAMES: names} if names else {})


def read_tensors(path: Path) -> "dict[str, torch.Tensor] | None":
    """Read tensors from a safetensors file, or return None if it does not exist; raises a FedhetError if damaged."""
    import torch

    if not path.is_file():
        return None
    tensors, metadata = read_safetensors(path, "pt")
    if PACKED not in metadata:
        return tensors
    try:
        kinds = {name: (getattr(torch, dtype), shape) for name, (dtype, shape) in json.loads(metadata[PACKED]).items()}
        parts = tensors[PACKED].split([math.prod(shape) * dtype.itemsize for dtype, shape in kinds.values()])
        pairs = zip(kinds.items(), parts, strict=True)
        # A clone is aligned for its dtype, and does not keep the other tensors in memory.
        return {name: part.clone().view(dtype).reshape(shape) for (name, (dtype, shape)), part in pairs}
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise FedhetError(f"{path} is damaged ({damage(error)}): restore it from a copy") from error


def read_safetensors(path: Path, framework: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arrays of a file, as `numpy` or `pt` (PyTorch) has them, and its metadata."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework) as file:
            metadata = json.loads((file.metadata() or {}).get(SEAL, "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError, ValueError, TypeError, RecursionError) as error:
        raise FedhetError(f"{path} is damaged ({error}): restore it from a copy") from error
    if not isinstance(metadata, dict) or not metadata.get("digest"):
        raise FedhetError(f"{path} is damaged or not written by fedhet, since it has no digest: restore it from a copy")
    digest = metadata.pop("digest")
    if digest != _digest(arrays, metadata):
        raise FedhetError(f"{path} is damaged, since its digest does not match its content: restore it from a copy")
    return arrays, metadata


def _digest(arrays: "Mapping[str, np.ndarray[Any, Any] | torch.Tensor]", text: Mapping[str, str]) -> str:
    import numpy as np

    content = hashlib.blake2b(repr(sorted(text.items())).encode(), digest_size=16)
    for name, array in sorted(arrays.items()):
        content.update(repr((name, str(array.dtype).removeprefix("torch."), tuple(array.shape))).encode())
        if not isinstance(array, np.ndarray):  # such as bfloat16, which NumPy does not know
            from fedhet.utils.inputs import as_bytes

            array = as_bytes(array).numpy()
        content.update(array.reshape(-1).view(np.uint8).data)
    return content.hexdigest()


BEST = "best"
"""The subfolder of `models/` for the models of the best round (`keep-best`)."""
BEST_ROUND = "method/best"
"""Name of a tensor with the number of this round, in the file of a client's best model."""


def round_folder(round: int) -> str:
    """Return the subfolder of `models/` for the models of a round, or "" if `round` is 0 (the last round)."""
    return f"round-{round}" if round else ""


def expanded(path: str | Path) -> Path:
    """Return a path with `~` replaced by the user's home folder; raises a ConfigError if that is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: the home folder is unknown: set the environment variable HOME") from error


def state_folder(state_dir: str | Path, run: str) -> Path:
    """Return the folder for clients' state: `state_dir`, or `~/.fedhet/state` if that is empty.

    If `run`, the identifier of a run, is not empty, return the subfolder of that name instead.
    """
    return expanded(state_dir or "~/.fedhet/state") / (file_name(run) if run else "")

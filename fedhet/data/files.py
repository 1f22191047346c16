"""Reading published data files: found where users keep them, unpacked on the way, and checked.

A `DataError` names the file that is missing, damaged, or not what it should be.
"""

import gzip
import io
import lzma
import os
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.errors import DataError

_UNPACKERS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.decompress, ".xz": lzma.decompress}

_downloads = ContextVar("downloads", default=True)


@contextmanager
def nothing_downloaded(really: bool = True) -> Iterator[None]:
    """Within it no data set is downloaded: a node's disk and network are not for a server to fill."""
    token = _downloads.set(_downloads.get() and not really)
    try:
        yield
    finally:
        _downloads.reset(token)


def cache_folder() -> Path:
    """Where data sets are kept that were downloaded, and what takes long to make of one's own files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedhet"


def variant(file: Path) -> Path | None:
    """The file itself, or packed with gzip or xz under its name and `.gz` or `.xz`; None if there is neither."""
    return next((packed for suffix in _UNPACKERS if (packed := file.with_name(file.name + suffix)).is_file()), None)


def locate(folder: Path | None, subfolders: Sequence[str], files: Sequence[str], dataset: str) -> Path:
    """The first of these subfolders, of the folder that a user named, that holds a data set's files.

    If none was named: of the cache folder, to which torchvision's data set of this name is downloaded if need be.
    """
    root = folder or cache_folder()
    places = [root / subfolder for subfolder in subfolders]
    if folder is None and not any(all(variant(place / file) for file in files) for place in places):
        _download(dataset)
    if not root.is_dir():
        raise DataError(f"the data folder {root} does not exist")
    for place in places:
        missing = [file for file in files if variant(place / file) is None]
        if not missing:
            return place
        if len(missing) < len(files):
            raise DataError(f"{dataset} in {place} is incomplete: {', '.join(missing)} missing (.gz and .xz will do)")
    looked = ", ".join(map(str, places))
    raise DataError(f"no {dataset} in {root}: looked for {files[0]} (or .gz, .xz) in {looked}")


def locate_one(root: Path | None, subfolder: str, files: Sequence[str], dataset: str) -> Path:
    """The first of these files in the folder that a user named, or else in this subfolder of it."""
    if root is None:
        raise DataError(f"{dataset} cannot be downloaded: name a folder with {' or '.join(files)}: --data DIR")
    paths = (place / file for place in (root, root / subfolder) for file in files)
    return next(filter(variant, paths), None) or locate(root, ("", subfolder), files, dataset)


def _download(dataset: str) -> None:
    """Have torchvision download its data set of this name, that of its class, to the cache folder."""
    cache = cache_folder()
    if not _downloads.get():
        raise DataError(
            f"{dataset} is not in {cache}, and nodes download nothing: name its folder, data = ... (or data-path)"
        )
    try:
        import torchvision  # late: only a download needs it, and it fails where its build is not torch's

        getattr(torchvision.datasets, dataset)(root=cache, download=True)
    except (OSError, RuntimeError, ImportError) as error:
        raise DataError(
            f"{dataset} is not in {cache} and cannot be downloaded ({' '.join(str(error).split())}); "
            "if you have it elsewhere, name its folder: --data DIR"
        ) from error


def read(file: Path) -> bytes:
    """Contents of a file, unpacked if only its `.gz` or `.xz` is there."""
    packed = variant(file)
    if packed is None:
        raise DataError(f"{file} is missing")
    try:
        return _UNPACKERS[packed.suffix if packed != file else ""](packed.read_bytes())
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{packed} is damaged ({error}): get it again") from error


def rows_of(file: Path) -> Iterator[str]:
    """Lines of a text file in UTF-8, read one by one, unpacked if only its `.gz` or `.xz` is there."""
    packed = variant(file)
    if packed is None:
        raise DataError(f"{file} is missing")
    opened: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    try:
        with opened.get(packed.suffix if packed != file else "", open)(packed, "rt", encoding="utf-8") as lines:
            yield from lines
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{packed} is damaged ({error}): get it again") from error


def read_idx(file: Path) -> Tensor:
    """A uint8 tensor from a file in MNIST's idx format: magic number, sizes (big-endian int32), values."""
    content = read(file)
    # The magic number is two zeros, the type (8: uint8) and the number of dimensions.
    if len(content) < 4 or content[:3] != b"\x00\x00\x08" or len(content) < 4 + 4 * content[3]:
        raise DataError(f"{file} is not an idx file of bytes: its first bytes are {content[:4].hex(' ')}")
    shape = np.frombuffer(content, ">u4", count=content[3], offset=4).tolist()
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape))
    if len(values) != prod(shape):
        raise DataError(f"{file} is damaged: {len(values)} values, but its header says {shape}, {prod(shape)} values")
    return torch.from_numpy(values.reshape(shape).copy())


class _ArraysOnly(pickle.Unpickler):
    """Unpickles arrays, numbers, text and containers; a pickle that wants to call anything else is refused."""

    ALLOWED = frozenset(
        [("_codecs", "encode"), ("numpy", "ndarray"), ("numpy", "dtype")]
        + [(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")]
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_cifar(file: Path, labelled: str = "labels", classes: int = 10) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 32, 32) uint8 and the labels (n,) int64 of this name in a batch file of CIFAR's python version."""
    content = read(file)
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
        images = torch.tensor(np.asarray(batch["data"]))
        labels = torch.tensor(batch[labelled])
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(f"{file} is not a batch of CIFAR's python version ({type(error).__name__}: {error})") from error
    if images.dtype != torch.uint8 or images.shape != (len(labels), 3072) or labels.dtype != torch.int64:
        got = f"{tuple(images.shape)}, {len(labels)}"
        raise DataError(f"{file}: expected (n, 3072) uint8 images and n labels, got {got}")
    check_labels(file, labels, classes)
    return images.view(-1, 3, 32, 32), labels


def check_labels(file: Path, labels: Tensor, classes: int) -> None:
    """Refuse a file without labels, or with one that is not in 0..classes - 1."""
    if labels.numel() == 0 or not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(f"{file}: expected labels from 0 to {classes - 1}")

"""Functions to find, unpack, decode and check data files; they raise a `DataError` for a missing or damaged file."""

import gzip
import io
import lzma
import os
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.data.examples import digest
from fedhet.errors import DataError, FedhetError, damage
from fedhet.utils.files import expanded, read_tensors, write_tensors
from fedhet.utils.machine import cores

_OPENERS: dict[str, Callable[..., Any]] = {"": open, ".gz": gzip.open, ".xz": lzma.open}

_images: ContextVar[Path | None] = ContextVar("images", default=None)


@contextmanager
def nothing_downloaded(images: Path | None) -> Iterator[None]:
    """Context manager that forbids downloads of data sets, because a server must not fill a node's disk.

    Decoded images are cached in the folder `images`. If it is None, the context has no effect.
    """
    token = _images.set(images or _images.get())
    try:
        yield
    finally:
        _images.reset(token)


def cache_folder() -> Path:
    """Return the folder in the user's cache for downloaded data sets and, except at nodes, decoded images."""
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fedhet"


def variant(file: Path) -> Path | None:
    """Return the path of a file or of its compressed copy (suffix `.gz` or `.xz`), or None if neither exists."""
    return next((packed for suffix in _OPENERS if (packed := file.with_name(file.name + suffix)).is_file()), None)


def locate(folder: Path | None, subfolders: Sequence[str], files: Sequence[str], dataset: str) -> Path:
    """Return the first of the `subfolders` of `folder` that contains all `files` of a data set; else raise a DataError.

    If `folder` is None, use the cache folder; the class `dataset` of `torchvision.datasets` downloads missing files.
    """
    root = folder or cache_folder()
    places = [root / subfolder for subfolder in subfolders]
    if folder is None and not any(all(variant(place / file) for file in files) for place in places):
        _download(dataset)
    if not root.is_dir():
        raise DataError(f"the data folder {root} does not exist: set data (--data DIR) to an existing folder")
    for place in places:
        missing = [file for file in files if variant(place / file) is None]
        if not missing:
            return place
        if len(missing) < len(files):
            raise DataError(f"{dataset} in {place} is incomplete: add {', '.join(missing)} (or .gz, .xz)")
    looked = ", ".join(map(str, places))
    raise DataError(f"no {dataset} in {root}: put {files[0]} (or .gz, .xz) into one of the folders {looked}")


def locate_one(root: Path | None, subfolder: str, files: Sequence[str], dataset: str) -> Path:
    """Return the first of `files` found in `root` or its `subfolder`; else raise a DataError that names `dataset`."""
    if root is None:
        raise DataError(f"{dataset} cannot be downloaded: set data (--data DIR) to a folder with {' or '.join(files)}")
    paths = (place / file for place in (root, root / subfolder) for file in files)
    return next(filter(variant, paths), None) or locate(root, ("", subfolder), files, dataset)


def _download(dataset: str) -> None:
    cache = cache_folder()
    if _images.get():
        raise DataError(
            f"{dataset} is not in {cache}, and nodes do not download data sets: set data in the node config, or in the "
            f"run config of a simulation, to a folder with the files of {dataset}"
        )
    try:
        import torchvision  # imported late because it fails if its build does not match torch's

        getattr(torchvision.datasets, dataset)(root=cache, download=True)
    except (OSError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{dataset} is not in {cache} and cannot be downloaded ({reason}): set data (--data DIR) to a folder "
            "with its files"
        ) from error


@contextmanager
def _opened(file: Path, **options: str) -> Iterator[Any]:
    if (packed := variant(file)) is None:
        raise DataError(f"the file {file} is missing: add it or its copy compressed as .gz or .xz")
    try:
        with _OPENERS[packed.suffix if packed != file else ""](packed, **options) as opened:
            yield opened
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"the file {packed} is damaged ({error}): download it again") from error


def read(file: Path) -> bytes:
    """Return the content of a file or of its compressed copy, decompressed."""
    with _opened(file, mode="rb") as opened:
        return opened.read()


def rows_of(file: Path) -> Iterator[str]:
    """Iterate over the lines of a UTF-8 text file or of its compressed copy."""
    with _opened(file, mode="rt", encoding="utf-8") as lines:
        yield from lines


def read_idx(file: Path) -> Tensor:
    """Read a uint8 tensor from a file in MNIST's idx format: magic number, sizes (big-endian int32), values."""
    content = read(file)
    # The magic number is two zeros, the type (8: uint8) and the number of dimensions.
    if len(content) < 4 or content[:3] != b"\x00\x00\x08" or len(content) < 4 + 4 * content[3]:
        raise DataError(f"{file} is not an idx file of bytes (header {content[:4].hex(' ')}): download it again")
    shape = np.frombuffer(content, ">u4", count=content[3], offset=4).tolist()
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape))
    if len(values) != prod(shape):
        raise DataError(f"{file} has {len(values)} values, but its header says {prod(shape)}: download it again")
    return torch.from_numpy(values.reshape(shape).copy())


class _ArraysOnly(pickle.Unpickler):
    ALLOWED = frozenset(
        [("_codecs", "encode"), ("numpy", "ndarray"), ("numpy", "dtype")]
        + [(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")]
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            # `read_cifar` adds the name of the file and the remedy.
            raise DataError(f"the file has {module}.{name}, but may have only NumPy arrays: other objects can run code")
        # Versions of NumPy have this function in different modules.
        return np.zeros(0).__reduce__()[0] if name == "_reconstruct" else super().find_class(module, name)


def read_cifar(file: Path, key: str = "labels", classes: int = 10) -> tuple[Tensor, Tensor]:
    """Read images (n, 3, 32, 32) uint8 and int64 labels below `classes`, the entry `key`, from a CIFAR Python file."""
    content = read(file)
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
        images = torch.tensor(np.asarray(batch["data"]))
        labels = torch.tensor(batch[key])
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(f"{file} is no batch of CIFAR's Python version ({damage(error)}): download it again") from error
    if images.dtype != torch.uint8 or images.shape != (len(labels), 3072) or labels.dtype != torch.int64:
        got = f"{tuple(images.shape)}, {len(labels)}"
        raise DataError(f"{file} must have (n, 3072) uint8 images and n labels, but has {got}: download it again")
    check_labels(file, labels, classes)
    return images.view(-1, 3, 32, 32), labels


def check_labels(file: Path, labels: Tensor, classes: int) -> None:
    """Check that the labels from a file are not empty and lie between 0 and classes - 1; else raise a `DataError`."""
    if labels.numel() == 0 or not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(f"{file} must have labels from 0 to {classes - 1}: download it again")


def digest_of_files(files: Iterable[Path], unit: int = 10**9) -> str:
    """Return a digest of the files' names, sizes and times of change, which takes less time than one of their content.

    Times count in whole units of `unit` nanoseconds, by default in seconds, as tar restores them. Of a copy without the
    times of the original (`cp` without `-p`), the digest is another one.
    """
    return digest(*((file.name, file.stat().st_size, file.stat().st_mtime_ns // unit) for file in files))


def images_of(files: Sequence[Path], side: int, *, mode: str, dataset: str, enlarge: bool = False) -> Tensor:
    """Return image files as tensor (n, channels, side, side) uint8 in Pillow's `mode`, L or RGB; cached by `dataset`.

    Unless `enlarge`, images are smaller if the first one is. Raises a DataError if a file is no image of 8 bits.
    """
    content = digest(side, digest_of_files(files, unit=1))
    cache = (_images.get() or cache_folder()) / dataset / f"{content}.safetensors"
    with suppress(FedhetError, OSError):  # a file that is damaged or belongs to another user is replaced, if possible
        if (kept := read_tensors(cache)) is not None:
            return kept["images"]
    side = side if enlarge else min(side, *_decoded(files[0], mode).shape[1:])
    images = torch.empty(len(files), len(mode), side, side, dtype=torch.uint8)
    with ThreadPoolExecutor(cores()) as pool:
        for place, image in enumerate(pool.map(lambda file: _decoded(file, mode, side), files)):
            images[place] = image
    with suppress(OSError):  # images that cannot be kept are decoded again
        write_tensors(cache, {"images": images})
        cache.chmod(0o600)
        for older in cache.parent.iterdir() if _images.get() else ():
            if older != cache:  # it may have images that the node's owner has removed
                older.unlink()
    return images


def _decoded(file: Path, mode: str, side: int = 0) -> Tensor:
    from PIL import Image  # imported late because few data sets need it

    try:
        with Image.open(file) as image:
            if image.mode[0] in "IF":  # Pillow would cut all values beyond 255
                raise DataError(f"{file} has more than 8 bits a pixel: convert it to 8 bits")
            shown = image.convert(mode)
            if side and shown.size != (side, side):
                shown = shown.resize((side, side), Image.Resampling.BILINEAR)
            return torch.from_numpy(np.atleast_3d(np.array(shown))).permute(2, 0, 1)
    except DataError:
        raise
    except Exception as error:  # a damaged image, or one of too many pixels, may raise anything
        raise DataError(f"{file} cannot be read as an image ({error}): replace or remove it") from error

"""NIH ChestX-ray14: chest radiographs with any of 14 findings, split and shared out by patient."""

import csv
import hashlib
import io
import re
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhet.data.examples import DataSet, Examples, Indices, Owners
from fedhet.data.files import cache_folder, locate_one, read, variant
from fedhet.data.registry import register_dataset
from fedhet.data.transforms import Normalise
from fedhet.errors import DataError, FedhetError
from fedhet.files import read_tensors, write_tensors
from fedhet.machine import cores
from fedhet.task import get_task
from fedhet.text import log

FINDINGS = (
    *("Atelectasis", "Cardiomegaly", "Effusion", "Infiltration", "Mass", "Nodule", "Pneumonia", "Pneumothorax"),
    *("Consolidation", "Edema", "Emphysema", "Fibrosis", "Pleural_Thickening", "Hernia"),
)
"""In the order of Wang et al. (CVPR 2017); an image without any is labelled `No Finding`."""

LABELS = ("Data_Entry_2017_v2020.csv", "Data_Entry_2017.csv")
OFFICIAL_TEST = "test_list.txt"
COLUMNS = {"Image Index", "Finding Labels", "Patient ID", "Patient Age", "Patient Gender"}
SIZE = 224
"""Pixels a side of an image in memory, at most: those of FLHA-GHN's experiment."""

Row = dict[str, str]


@register_dataset("chestxray14")
def chestxray14(folder: Path | None, *, size: int = SIZE) -> DataSet:
    """Grey images with 14 labels each (Wang et al., CVPR 2017: 112,120 images of 30,805 patients); mean AUC.

    The test part has the patients of the official `test_list.txt` where it is there, else every fifth one. `iid` deals
    whole patients; the natural clients are groups of one sex and decade of age (at the first image), 90 and above in
    one. Images are decoded once, and kept as bytes (5.6 GB at 224 x 224) in memory and in the user's cache folder.

    Args:
        folder: holds the labels (see `LABELS`, also packed), or does in `chestxray`; and there, at any depth, PNG
            images under their original names. Rows without an image are left out.
        size: pixels a side; larger images are shrunk.

    Raises:
        DataError: labels or images are missing or damaged, or a patient of the official test list is not only there.
    """
    table = locate_one(folder, "chestxray", LABELS, "chestxray14")
    files = {path.name: path for path in sorted(table.parent.rglob("*.png"), reverse=True)}
    rows = _rows(table, files.keys())
    numbers = [int(row["Patient ID"]) for row in rows]
    _, firsts, owners = np.unique(numbers, return_index=True, return_inverse=True)
    groups = np.unique([_group(rows[first]) for first in firsts], return_inverse=True)[1][owners]
    tested = _tested(table.parent / OFFICIAL_TEST, rows, owners)
    labels = torch.tensor([_labels(row, table) for row in rows], dtype=torch.uint8)
    examples = Examples(_images([files[row["Image Index"]] for row in rows], size), labels)
    train, test = np.flatnonzero(~tested), np.flatnonzero(tested)
    return DataSet(
        name="chestxray14",
        train=examples.subset(train),
        test=examples.subset(test),
        classes=len(FINDINGS),
        task=get_task("multi-label"),
        input_shape=tuple(examples.inputs[:1].shape[1:]),
        transform=Normalise(255.0, mean=(0.52,), std=(0.25,)),
        groups=Owners(groups[train], groups[test]),
        together=Owners(owners[train], owners[test]),
    )


def _rows(table: Path, images: Container[str]) -> list[Row]:
    """Return the rows of the table whose images exist, in order."""
    try:
        rows = list(csv.DictReader(io.StringIO(read(table).decode("utf-8-sig"))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table} is no table of labels: {error}") from error
    if missing := COLUMNS - set(rows[0] if rows else ()):
        raise DataError(f"{table}: has no column {', '.join(sorted(missing))}")
    present = [row for row in rows if row["Image Index"] in images]
    if not present:
        raise DataError(
            f"{table.parent} holds none of the {len(rows)} images of {table.name}, as PNG under their names"
        )
    return present


def _tested(listed: Path, rows: Sequence[Row], owners: Indices) -> NDArray[np.bool_]:
    """Which rows are for testing, all of a patient or none."""
    if variant(listed) is None:
        return owners % 5 == 4
    official = set(read(listed).decode().split())
    tested = np.array([row["Image Index"] in official for row in rows])
    if len(parted := np.intersect1d(owners[tested], owners[~tested])):
        patient = rows[int(np.argmax(owners == parted[0]))]["Patient ID"]
        raise DataError(f"{listed}: has some images of patient {patient}, and not all")
    return tested


def _labels(row: Row, table: Path) -> list[int]:
    named = row["Finding Labels"].split("|")
    if unknown := set(named) - {*FINDINGS, "No Finding"}:
        raise DataError(f"{table}: image {row['Image Index']} has the unknown finding {sorted(unknown)[0]!r}")
    return [int(finding in named) for finding in FINDINGS]


def _group(row: Row) -> str:
    """Sex and decade of age."""
    age = int(re.sub(r"\D", "", row["Patient Age"]) or 0)  # the first edition of the table writes 058Y
    return f"{row['Patient Gender']} {min(age // 10, 9)}"


def _images(files: Sequence[Path], size: int) -> Tensor:
    """The decoded images, kept in the cache folder for the same files and size."""
    content = hashlib.blake2b(str(size).encode(), digest_size=12)
    for file in files:
        stat = file.stat()
        content.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    cache = cache_folder() / "chestxray14" / f"{content.hexdigest()}.safetensors"
    with suppress(FedhetError):  # it is damaged, and written anew
        if (kept := read_tensors(cache)) is not None:
            return kept["images"]
    images = _decoded(files, size)
    try:
        write_tensors(cache, {"images": images})
    except OSError as error:
        log.warning("decoded images cannot be kept in %s for the next time: %s", cache.parent, error)
    return images


def _decoded(files: Sequence[Path], size: int) -> Tensor:
    """Images (n, 1, side, side) uint8, the side that of the first one or `size`, whichever is less."""
    from PIL import Image  # late: only this data set needs it

    def decoded(file: Path, side: int = 0) -> Tensor:
        try:
            with Image.open(file) as image:
                grey = image.convert("L")
                if side and grey.size != (side, side):
                    grey = grey.resize((side, side), Image.Resampling.BILINEAR)
                return torch.from_numpy(np.array(grey))
        except OSError as error:
            raise DataError(f"{file} is no image that can be read ({error}): get it again") from error

    side = min(size, *decoded(files[0]).shape)
    images = torch.empty(len(files), 1, side, side, dtype=torch.uint8)
    with ThreadPoolExecutor(cores()) as pool:
        for place, image in enumerate(pool.map(lambda file: decoded(file, side), files)):
            images[place, 0] = image
    return images

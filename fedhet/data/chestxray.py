"""NIH ChestX-ray14: chest radiographs with any of 14 findings, split by patient."""

import csv
import io
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhet.data.examples import DataSet, Examples, Indices, Normalise, Owners, digest
from fedhet.data.files import cache_folder, locate_one, read, variant
from fedhet.data.registry import register_dataset
from fedhet.errors import DataError, FedhetError
from fedhet.tasks import Task
from fedhet.utils.files import read_tensors, write_tensors
from fedhet.utils.machine import cores

FINDINGS = (  # the labels, in the order of Wang et al. (CVPR 2017)
    *("Atelectasis", "Cardiomegaly", "Effusion", "Infiltration", "Mass", "Nodule", "Pneumonia", "Pneumothorax"),
    *("Consolidation", "Edema", "Emphysema", "Fibrosis", "Pleural_Thickening", "Hernia"),
)
LABELS = ("Data_Entry_2017_v2020.csv", "Data_Entry_2017.csv")
TEST_LIST = "test_list.txt"
COLUMNS = {"Image Index", "Finding Labels", "Patient ID"}
SIZE = 224  # largest height and width of images in memory, as in FLHA-GHN's experiment

Row = dict[str, str]


@register_dataset("chestxray14")
def chestxray14(folder: Path | None, *, size: int = SIZE) -> DataSet:
    """Load ChestX-ray14 (Wang et al., CVPR 2017): 112,120 grey images of 30,805 patients; multi-label, 14 findings.

    `folder`, which is required, contains the table of labels (`Data_Entry_2017.csv`), directly or in its subfolder
    `chestxray`, and PNG images in any subfolder. Rows without an image are left out. Images are shrunk to `size` x
    `size` pixels and stored in the user's cache folder (5.6 GB). The test examples are the images in `test_list.txt`
    or, without this file, those of every fifth patient. Raises a `DataError` for missing or damaged files.
    """
    table = locate_one(folder, "chestxray", LABELS, "chestxray14")
    files = {path.name: path for path in sorted(table.parent.rglob("*.png"), reverse=True)}
    rows = _rows(table, files.keys())
    owners = np.unique([int(row["Patient ID"]) for row in rows], return_inverse=True)[1]
    tested = _tested(table.parent / TEST_LIST, rows, owners)
    labels = torch.tensor([_labels(row, table) for row in rows], dtype=torch.uint8)
    examples = Examples(_images([files[row["Image Index"]] for row in rows], size), labels)
    train, test = np.flatnonzero(~tested), np.flatnonzero(tested)
    parts = examples.subset(train), examples.subset(test)
    shape = tuple(examples.inputs[:1].shape[1:])
    patients = Owners(owners[train], owners[test])
    normalise = Normalise(255.0, mean=(0.52,), std=(0.25,))
    return DataSet("chestxray14", *parts, len(FINDINGS), Task("multi-label"), shape, normalise, together=patients)


def _rows(table: Path, images: Container[str]) -> list[Row]:
    try:
        rows = list(csv.DictReader(io.StringIO(read(table).decode("utf-8-sig"))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table} is not a CSV table of labels ({error}): download it again") from error
    if missing := COLUMNS - set(rows[0] if rows else ()):
        raise DataError(f"the table {table} has no column {', '.join(sorted(missing))}: download it again")
    present = [row for row in rows if row["Image Index"] in images]
    if not present:
        raise DataError(f"the folder {table.parent} has none of the {len(rows)} images of {table.name}: add PNG files")
    return present


def _tested(listed: Path, rows: Sequence[Row], owners: Indices) -> NDArray[np.bool_]:
    if variant(listed) is None:
        return owners % 5 == 4
    official = set(read(listed).decode().split())
    tested = np.array([row["Image Index"] in official for row in rows])
    if len(parted := np.intersect1d(owners[tested], owners[~tested])):
        patient = rows[int(np.argmax(owners == parted[0]))]["Patient ID"]
        raise DataError(f"the file {listed} lists only some images of patient {patient}: list all of them, or none")
    return tested


def _labels(row: Row, table: Path) -> list[int]:
    named = row["Finding Labels"].split("|")
    if unknown := set(named) - {*FINDINGS, "No Finding"}:
        finding, image = min(unknown), row["Image Index"]
        raise DataError(f"the table {table} has the unknown finding {finding!r} of image {image}: download it again")
    return [int(finding in named) for finding in FINDINGS]


def _images(files: Sequence[Path], size: int) -> Tensor:
    """Return PNG files as square images (n, 1, side, side) uint8, side <= `size`; the decoded images are cached."""
    content = digest(size, *((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files))
    cache = cache_folder() / "chestxray14" / f"{content}.safetensors"
    with suppress(FedhetError):  # a damaged file is replaced
        if (kept := read_tensors(cache)) is not None:
            return kept["images"]
    images = _decoded(files, size)
    with suppress(OSError):  # images that cannot be kept are decoded again
        write_tensors(cache, {"images": images})
    return images


def _decoded(files: Sequence[Path], size: int) -> Tensor:
    from PIL import Image  # imported late because only this data set needs it

    def decoded(file: Path, side: int = 0) -> Tensor:
        try:
            with Image.open(file) as image:
                grey = image.convert("L")
                if side and grey.size != (side, side):
                    grey = grey.resize((side, side), Image.Resampling.BILINEAR)
                return torch.from_numpy(np.array(grey))
        except OSError as error:
            raise DataError(f"{file} cannot be read as an image ({error}): download it again") from error

    side = min(size, *decoded(files[0]).shape)
    images = torch.empty(len(files), 1, side, side, dtype=torch.uint8)
    with ThreadPoolExecutor(cores()) as pool:
        for place, image in enumerate(pool.map(lambda file: decoded(file, side), files)):
            images[place, 0] = image
    return images

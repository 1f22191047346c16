"""NIH ChestX-ray14: chest radiographs with any of 14 findings, split by patient."""

import csv
import io
from collections.abc import Container, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedhet.data.examples import DataSet, Examples, Indices, Normalise, Owners, register_dataset
from fedhet.data.files import digest_of_files, images_of, locate_one, read, variant
from fedhet.errors import DataError
from fedhet.tasks import Task

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
    `size` pixels and cached (5.6 GB). The test examples are the images in `test_list.txt` or, without this file, those
    of every fifth patient. Raises a `DataError` for missing or damaged files.
    """
    table = locate_one(folder, "chestxray", LABELS, "chestxray14")
    files = {path.name: path for path in sorted(table.parent.rglob("*.png"), reverse=True)}
    rows = _rows(table, files.keys())
    owners = np.unique([int(row["Patient ID"]) for row in rows], return_inverse=True)[1]
    tested = _tested(table.parent / TEST_LIST, rows, owners)
    labels = torch.tensor([_labels(row, table) for row in rows], dtype=torch.uint8)
    images = [files[row["Image Index"]] for row in rows]
    examples = Examples(images_of(images, size, mode="L", dataset="chestxray14"), labels)
    parts = examples.subset(~tested), examples.subset(tested)
    shape = tuple(examples.inputs[:1].shape[1:])
    patients = Owners(owners[~tested], owners[tested])
    normalise = Normalise(255.0, mean=(0.52,), std=(0.25,))
    task = Task("multi-label")
    unique = digest_of_files(images)
    return DataSet("chestxray14", *parts, len(FINDINGS), task, shape, normalise, together=patients, files=unique)


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
        finding = min(unknown)
        image = row["Image Index"]
        raise DataError(f"the table {table} has the unknown finding {finding!r} of image {image}: download it again")
    return [int(finding in named) for finding in FINDINGS]

"""A folder of images of one's own: subfolders by class, or a table of labels beside the images."""

import csv
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedhet.data.examples import DataSet, Examples, Normalise, Owners, register_dataset
from fedhet.data.files import digest_of_files, images_of
from fedhet.errors import DataError
from fedhet.tasks import Task

TABLE, CLASSES = "labels.csv", "classes.txt"
SIDE = 224  # height and width of images in memory; `input-size` changes them at the network's input
SHAPE = 3, SIDE, SIDE


@register_dataset("folder")
def folder(place: Path | None) -> DataSet:
    """Load images of one's own, in colour, 224 x 224 pixels, each of one class; `place` is their folder.

    It has a subfolder of images for each class; or the table `labels.csv` with the columns `file` (path in the folder),
    `label` and optionally `patient`, whose images stay together. Every fifth image of a class, or patient, is for
    tests. Classes are sorted by name; `classes.txt` names them, one a line, if images of some class are missing.
    """
    if place is None or not place.is_dir():
        raise DataError(f"dataset = folder: {place or 'no folder'} is not a folder of images: set the key data to one")
    # `glob` leaves out what this user may not read, and a class would be missing.
    for folder in (place, *place.glob("*/**/")):
        if not os.access(folder, os.R_OK | os.X_OK):
            raise DataError(f"{folder} cannot be read by this user: permit it, or start the node as another user")
    table = place / TABLE
    files = [path for path in sorted(place.glob("*/**/*")) if path.is_file() and not path.name.startswith(".")]
    rows = _rows_of(table) if table.is_file() else [(file, file.relative_to(place).parts[0], "") for file in files]
    if not rows or not all(label for _, label, _ in rows) or len({bool(patient) for *_, patient in rows}) > 1:
        raise DataError(f"{place} must have subfolders of images by class, or {TABLE} without empty cells: add them")
    if {label for _, label, _ in rows} <= {"train", "test", "val"}:
        raise DataError(f"{place} has the subfolders train and test: move their subfolders by class into {place}")
    paths, labels, patients = zip(*rows, strict=True)
    classes = _classes_of(place / CLASSES) or sorted({*labels})
    if unknown := sorted({*labels} - {*classes}):
        raise DataError(f"{place} has images of class {unknown[0]!r}, which {CLASSES} does not name: add it there")
    owners = np.unique(patients, return_inverse=True)[1]
    seen = Counter[str]()
    for row, label in enumerate(labels if not any(patients) else ()):
        owners[row] = seen[label]
        seen[label] += 1
    tested = owners % 5 == 4
    if tested.all() or not tested.any():
        raise DataError(f"{place} has too few images for training and tests: add images, at least five of a class")
    places = torch.tensor([classes.index(label) for label in labels])
    examples = Examples(images_of(paths, SIDE, mode="RGB", dataset="folder", enlarge=True), places)
    parts = examples.subset(~tested), examples.subset(tested)
    normalise = Normalise(255.0, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    dataset = DataSet("folder", *parts, len(classes), Task("classification"), SHAPE, normalise)
    together = Owners(owners[~tested], owners[tested]) if any(patients) else None
    return replace(dataset, together=together, class_names=tuple(classes), files=digest_of_files(paths))


def _classes_of(file: Path) -> list[str]:
    try:
        lines = file.read_text("utf-8-sig").splitlines() if file.is_file() else []
    except UnicodeDecodeError as error:
        raise DataError(f"{file} must have the names of classes in UTF-8, one a line ({error}): correct it") from error
    names = [line.strip() for line in lines if line.strip()]
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{file} names the class {twice[0]!r} twice: remove a line")
    return names


def _rows_of(table: Path) -> list[tuple[Path, str, str]]:
    try:
        with table.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, strict=True)
            columns = [*(reader.fieldnames or ())]
            rows = [*reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table} must be CSV in UTF-8 with columns file and label ({error}): correct it") from error
    names = [*filter(None, columns)]  # spreadsheets add columns without a name
    if not {"file", "label"} <= {*names} or len({*names}) < len(names):
        raise DataError(
            f"{table} must be CSV, with commas, with columns file and label, and none twice, but its first line has "
            f"{', '.join(map(repr, names))[:200] or 'no columns'}: correct it"
        )
    named = set[str]()
    for number, row in enumerate(rows, 1):
        # Cells beyond the last column have the name None; a comma in a label needs quotes.
        if None in row or None in row.values():
            raise DataError(f"{table} must have {len(columns)} cells in each row, but row {number} has not: correct it")
        name = row["file"]
        # A pipe is no regular file, and reading it may never end.
        if Path(name).is_absolute() or ".." in Path(name).parts or not os.path.isfile(table.parent / name):
            raise DataError(f"{table} names {name[:100]!r}, which is no file below {table.parent}: correct it")
        if (file := os.path.normpath(name)) in named:
            raise DataError(f"{table} names {name[:100]!r} twice, but an image is one example: remove a row")
        named.add(file)
    return [(table.parent / row["file"], row["label"].strip(), row.get("patient", "").strip()) for row in rows]

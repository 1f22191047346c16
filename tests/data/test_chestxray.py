"""ChestX-ray14 from generated tables and images."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedhet import data
from fedhet.config import configuration
from fedhet.data.chestxray import FINDINGS, chestxray14
from fedhet.errors import DataError
from fedhet.setup import client_setup

COLUMNS = ["Image Index", "Finding Labels", "Follow-up #", "Patient ID", "Patient Age", "Patient Gender"]
PATIENTS, EACH = 30, 3


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: Path, *, findings: str = "", side: int = 12, table: str = "Data_Entry_2017_v2020.csv") -> Path:
    """Write three images of grey level p for each patient p, with finding p modulo 15 (the last is none)."""
    folder.mkdir(parents=True)
    rows = []
    for patient in range(1, PATIENTS + 1):
        named = findings or (*FINDINGS, "No Finding")[patient % 15]
        for number in range(EACH):
            name = f"{patient:08d}_{number:03d}.png"
            place = folder / f"images_{number:03d}" / "images"
            place.mkdir(parents=True, exist_ok=True)
            shape = (side, side, 3) if number == 1 else (side, side)
            Image.fromarray(np.full(shape, patient, np.uint8)).save(place / name)
            rows.append([name, named, number, patient, f"{3 * patient:03d}Y", "MF"[patient % 2]])
    rows.append(["00009999_000.png", "Mass", 0, 9999, 50, "F"])
    with (folder / table).open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return folder


def patients(part: data.Examples) -> np.ndarray:
    return part.inputs[:, 0, 0, 0].numpy()


def test_images_labels_and_task(tmp_path: Path) -> None:
    dataset = data.load("chestxray14", write(tmp_path / "nih"))
    assert len(dataset.train) + len(dataset.test) == PATIENTS * EACH, "a row without an image is left out"
    assert (dataset.input_shape, dataset.classes, dataset.task.metric) == ((1, 12, 12), 14, "auc")
    assert dataset.train.inputs.dtype == torch.uint8
    for part in (dataset.train, dataset.test):
        for patient, labels in zip(patients(part), part.labels, strict=True):
            expected = [patient % 15] if patient % 15 < 14 else []
            assert labels.nonzero()[:, 0].tolist() == expected
    several = data.load("chestxray14", write(tmp_path / "several", findings="Mass|Hernia"))
    assert several.test.labels.sum(0).nonzero()[:, 0].tolist() == [FINDINGS.index("Mass"), FINDINGS.index("Hernia")]


@pytest.mark.parametrize("official", [False, True])
def test_patients_of_the_test_list_or_every_fifth_are_for_testing(tmp_path: Path, official: bool) -> None:
    folder = write(tmp_path / "nih")
    if official:
        listed = [f"{patient:08d}_{number:03d}.png" for patient in (3, 4) for number in range(EACH)]
        (folder / "test_list.txt").write_text("\n".join(listed))
    dataset = data.load("chestxray14", folder)
    train, test = set(patients(dataset.train).tolist()), set(patients(dataset.test).tolist())
    assert train == set(range(1, PATIENTS + 1)) - test
    assert test == ({3, 4} if official else {5, 10, 15, 20, 25, 30})


def test_no_patient_is_at_two_clients(tmp_path: Path) -> None:
    dataset = data.load("chestxray14", write(tmp_path / "nih"))
    parts, other = (data.partition(dataset, "iid", clients=4, seed=seed) for seed in (0, 1))
    held = [{*patients(dataset.train)[part.train], *patients(dataset.test)[part.test]} for part in parts]
    assert sum(map(len, held)) == len(set.union(*held))
    assert [len(part.train) for part in parts] == [18] * 4
    assert sum(len(part.test) for part in parts) == 6 * EACH
    assert any(not np.array_equal(one.train, two.train) for one, two in zip(parts, other, strict=True))


def test_a_public_dataset_has_whole_patients(tmp_path: Path) -> None:
    dataset = data.load("chestxray14", write(tmp_path / "nih"))
    held_out, available = data.hold_out(dataset, 10, seed=0)
    public = dataset.train.inputs[held_out][:, 0, 0, 0].numpy()
    assert sorted(np.unique(public, return_counts=True)[1]) == [1, EACH, EACH, EACH]
    parts = data.partition(dataset, "iid", clients=3, seed=0, available=available)
    held = [patients(dataset.train)[part.train] for part in parts]
    assert not set(public) & set(np.concatenate(held))
    assert sum(map(len, held)) == len(dataset.train) - 4 * EACH
    again, other = (data.hold_out(dataset, 10, seed=seed)[0].tolist() for seed in (0, 1))
    assert held_out.tolist() == again != other
    with pytest.raises(DataError, match="public-samples = 71 leaves no data for clients, since all 24 owners"):
        data.hold_out(dataset, 71, seed=0)


def test_a_validation_part_has_whole_patients(tmp_path: Path) -> None:
    settings = {"method": "local", "dataset": "chestxray14", "data": str(write(tmp_path / "nih")), "clients": 3}
    config = configuration.resolve({**settings, "validation": 0.25})
    own = client_setup.data_of(client_setup.ClientInfo("1", 1, 3, config))
    assert own.validation is not None
    train, apart = set(patients(own.train)), patients(own.validation)
    assert not train & set(apart)
    assert (len(train), len(apart)) == (6, 2 * EACH)


def test_decoded_images_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "nih", side=20)
    opened: list[object] = []
    open_image = Image.open

    def opening(file: Path) -> Any:
        opened.append(file)
        return open_image(file)

    monkeypatch.setattr(Image, "open", opening)

    def loaded(size: int) -> tuple[torch.Tensor, bool]:
        opened.clear()
        images = chestxray14(folder, size=size).train.inputs
        return images, bool(opened)

    first, decoded = loaded(8)
    assert decoded
    assert first.shape[1:] == (1, 8, 8)
    again, decoded = loaded(8)
    assert not decoded
    assert torch.equal(first, again)
    assert loaded(224)[0].shape[1:] == (1, 20, 20), "images are never enlarged"
    for kept in (tmp_path / "cache" / "fedhet" / "chestxray14").iterdir():
        kept.write_bytes(kept.read_bytes()[:-100])
    again, decoded = loaded(8)
    assert decoded
    assert torch.equal(first, again)
    changed = next(folder.rglob("00000001_000.png"))
    Image.fromarray(np.full((20, 20), 99, np.uint8)).save(changed)
    assert 99 in loaded(8)[0][:, 0, 0, 0]
    monkeypatch.setenv("XDG_CACHE_HOME", str(changed))  # where no folder can be made
    assert loaded(6)[1]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("Data_Entry_2017_v2020.csv", b"Image Index,Label\n1.png,2\n", "has no column Finding Labels, Patient ID"),
        ("images_000/images/00000007_000.png", b"\x89PNG", r"00000007_000.png cannot be read as an image"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    (write(tmp_path / "nih") / file).write_bytes(content)
    with pytest.raises(DataError, match=message):
        data.load("chestxray14", tmp_path / "nih")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be downloaded: set data .* to a folder with Data_Entry_2017_v2020.csv"):
        data.load("chestxray14")
    with pytest.raises(DataError, match=r"no chestxray14 in .*: put Data_Entry_2017_v2020.csv"):
        data.load("chestxray14", tmp_path)
    folder = write(tmp_path / "nih", findings="Mas|Hernia")
    with pytest.raises(DataError, match=r"unknown finding 'Mas' of image 00000001_000.png"):
        data.load("chestxray14", folder)
    for path in folder.rglob("*.png"):
        path.unlink()
    with pytest.raises(DataError, match="has none of the 91 images"):
        data.load("chestxray14", folder)

"""ChestX-ray14 from tables and images made here."""

import csv
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedhet import config as configuration
from fedhet import data, population
from fedhet.data.chestxray import FINDINGS, chestxray14
from fedhet.errors import DataError

COLUMNS = ["Image Index", "Finding Labels", "Follow-up #", "Patient ID", "Patient Age", "Patient Gender"]
PATIENTS, EACH = 30, 3


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: Path, *, findings: str = "", side: int = 12, table: str = "Data_Entry_2017_v2020.csv") -> Path:
    """Patient p has three images of grey level p, of the finding p modulo 15 (the last is none); and one is missing."""
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


def test_several_findings_of_one_image(tmp_path: Path) -> None:
    dataset = data.load("chestxray14", write(tmp_path / "nih", findings="Mass|Hernia"))
    assert dataset.test.labels.sum(0).nonzero()[:, 0].tolist() == [FINDINGS.index("Mass"), FINDINGS.index("Hernia")]


@pytest.mark.parametrize("official", [False, True])
def test_no_patient_is_on_two_sides(tmp_path: Path, official: bool) -> None:
    folder = write(tmp_path / "nih")
    if official:
        listed = [f"{patient:08d}_{number:03d}.png" for patient in (3, 4) for number in range(EACH)]
        (folder / "test_list.txt").write_text("\n".join(listed))
    dataset = data.load("chestxray14", folder)
    train, test = set(patients(dataset.train).tolist()), set(patients(dataset.test).tolist())
    assert not train & test
    assert train | test == set(range(1, PATIENTS + 1))
    assert test == ({3, 4} if official else {5, 10, 15, 20, 25, 30})


def test_no_patient_is_at_two_clients(tmp_path: Path) -> None:
    dataset = data.load("chestxray14", write(tmp_path / "nih"))
    parts, other = (data.partition(dataset, "iid", clients=4, seed=seed) for seed in (0, 1))
    held = [{*patients(dataset.train)[part.train], *patients(dataset.test)[part.test]} for part in parts]
    assert sum(map(len, held)) == len(set.union(*held))
    assert [len(part.train) for part in parts] == [18] * 4
    assert sum(len(part.test) for part in parts) == 6 * EACH
    assert any(not np.array_equal(one.train, two.train) for one, two in zip(parts, other, strict=True))


def test_a_public_dataset_has_whole_patients_and_no_client_has_one_of_them(tmp_path: Path) -> None:
    dataset = data.load("chestxray14", write(tmp_path / "nih"))
    split = data.split(dataset, "iid", clients=3, seed=0, public_samples=10)
    assert split.public is not None
    public = split.public.inputs[:, 0, 0, 0].numpy()
    counts = np.unique(public, return_counts=True)[1]
    assert sorted(counts) == [1, EACH, EACH, EACH]
    held = [patients(dataset.train)[part.train] for part in split.parts]
    assert not set(public) & set(np.concatenate(held))
    assert sum(map(len, held)) == len(dataset.train) - 4 * EACH
    again, other = (data.split(dataset, "iid", clients=5, seed=seed, public_samples=10) for seed in (0, 1))
    assert again.public is not None
    assert other.public is not None
    assert split.public.digest == again.public.digest != other.public.digest
    with pytest.raises(DataError, match="71 examples that are held out belong to all of its 24 owners"):
        data.split(dataset, "iid", clients=3, seed=0, public_samples=71)


def test_a_validation_part_has_whole_patients(tmp_path: Path) -> None:
    settings = {"method": "local", "dataset": "chestxray14", "data": str(write(tmp_path / "nih")), "clients": 3}
    config = configuration.resolve({**settings, "validation": 0.25})
    for number in range(3):
        own = population.data_of(population.ClientInfo(str(number), number, 3, config))
        assert own.validation is not None
        train, apart = set(patients(own.train)), patients(own.validation)
        assert not train & set(apart)
        assert (len(train), len(apart)) == (6, 2 * EACH)


def test_decoded_images_are_kept_by_size_and_made_anew_if_they_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "nih", side=20)
    opened: list[object] = []
    open_image = Image.open

    def opening(file: Path) -> Any:
        opened.append(file)
        return open_image(file)

    monkeypatch.setattr(Image, "open", opening)

    def loaded(size: int) -> torch.Tensor:
        data.LOADED.clear()
        opened.clear()
        return chestxray14(folder, size=size).train.inputs

    first = loaded(8)
    assert opened
    again = loaded(8)
    assert not opened
    assert torch.equal(first, again)
    assert loaded(6).shape[1:] == (1, 6, 6)
    assert opened
    for kept in (tmp_path / "cache" / "fedhet" / "chestxray14").iterdir():
        kept.write_bytes(kept.read_bytes()[:-100])
    assert torch.equal(loaded(8), first)
    assert opened
    changed = next(folder.rglob("00000001_000.png"))
    Image.fromarray(np.full((20, 20), 99, np.uint8)).save(changed)
    assert 99 in loaded(8)[:, 0, 0, 0]
    monkeypatch.setenv("XDG_CACHE_HOME", str(changed))  # no folder can be made there
    assert torch.equal(loaded(6)[:, 0, 0, 0], loaded(8)[:, 0, 0, 0])


def test_large_images_are_shrunk_and_others_fitted(tmp_path: Path) -> None:
    folder = write(tmp_path / "nih", side=20)
    assert chestxray14(folder, size=8).train.inputs.shape[1:] == (1, 8, 8)
    assert data.load("chestxray14", folder).train.inputs.shape[1:] == (1, 20, 20)


@pytest.mark.parametrize("place", ["", "chestxray"])
def test_the_first_editions_table_and_a_packed_one_will_do(tmp_path: Path, place: str) -> None:
    folder = write(tmp_path / "root" / place, table="Data_Entry_2017.csv")
    table = folder / "Data_Entry_2017.csv"
    (folder / "Data_Entry_2017.csv.gz").write_bytes(gzip.compress(table.read_bytes()))
    table.unlink()
    assert len(data.load("chestxray14", tmp_path / "root").test) == 6 * EACH


class TestFaults:
    def test_no_folder(self) -> None:
        with pytest.raises(DataError, match="cannot be downloaded: name a folder with Data_Entry_2017_v2020.csv"):
            data.load("chestxray14")

    def test_no_table(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"no chestxray14 in .*: looked for Data_Entry_2017_v2020.csv"):
            data.load("chestxray14", tmp_path)

    def test_no_images(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "nih")
        for path in folder.rglob("*.png"):
            path.unlink()
        with pytest.raises(DataError, match="holds none of the 91 images"):
            data.load("chestxray14", folder)

    def test_another_table(self, tmp_path: Path) -> None:
        (write(tmp_path / "nih") / "Data_Entry_2017_v2020.csv").write_text("Image Index,Label\n1.png,2\n")
        with pytest.raises(DataError, match="has no column Finding Labels, Patient ID"):
            data.load("chestxray14", tmp_path / "nih")

    def test_an_unknown_finding(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"image 00000001_000.png has the unknown finding 'Mas'"):
            data.load("chestxray14", write(tmp_path / "nih", findings="Mas|Hernia"))

    def test_a_damaged_image(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "nih")
        broken = next(folder.rglob("00000007_000.png"))
        broken.write_bytes(broken.read_bytes()[:40])
        with pytest.raises(DataError, match=r"00000007_000.png cannot be read as an image"):
            data.load("chestxray14", folder)

    def test_a_test_list_that_parts_a_patient(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "nih")
        (folder / "test_list.txt").write_text("00000004_001.png\n")
        with pytest.raises(DataError, match="has some images of patient 4, but not all"):
            data.load("chestxray14", folder)


def test_a_federation_learns_from_it(tmp_path: Path) -> None:
    import fedhet

    settings = {
        "method": "layer-average",
        "dataset": "chestxray14",
        "data": str(write(tmp_path / "nih")),
        "architectures": "flha-small-cnn-4,flha-small-plain-4",
        "clients": 2,
        "rounds": 2,
        "learning-rate": 0.1,
        "test-on": "both",
    }
    result = fedhet.run(settings, out=tmp_path / "run")
    assert result.summary["status"] == "completed"
    assert 0 <= result.summary["personal_accuracy"]["weighted"] <= 1

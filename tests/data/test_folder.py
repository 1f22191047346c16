"""The data set `folder`: one's own images, by subfolder or table."""

import os
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedhet
from fedhet import data
from fedhet.config import configuration
from fedhet.data.examples import LOADED
from fedhet.data.files import nothing_downloaded
from fedhet.errors import DataError
from fedhet.setup import client_setup
from fedhet.setup.client_setup import ClientInfo


def write(folder: Path, name: str, level: int = 7) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 6), level, np.uint8)).save(path)


def test_subfolders_are_classes_and_every_fifth_image_is_for_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "images"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in range(10):
        write(place, f"ill/{number}.png", number)
        write(place, f"healthy/more/{number}.png", 100 + number)
    (place / "ill/.hidden").touch()
    dataset = data.load("folder", place)
    assert dataset.class_names == ("healthy", "ill")
    assert dataset.train.labels.tolist() == [0] * 8 + [1] * 8
    assert dataset.test.inputs[:, 0, 0, 0].tolist() == [104, 109, 4, 9]
    assert tuple(dataset.transform(dataset.test.inputs[:]).shape) == (4, *dataset.input_shape)
    (kept,) = (tmp_path / "cache").rglob("*.safetensors")
    assert kept.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_read_is_no_missing_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ill/0.png", "ill/later/0.png", "healthy/0.png"):
        write(tmp_path, name)
    for folder in (tmp_path, tmp_path / "ill", tmp_path / "ill/later"):
        # Root may read everything.
        monkeypatch.setattr(os, "access", lambda path, mode, locked=folder: path != locked)
        with pytest.raises(DataError, match=f"^{folder} cannot be read by this user"):
            data.load("folder", tmp_path)


def test_a_node_keeps_only_the_images_that_its_folder_has(tmp_path: Path) -> None:
    place, images = tmp_path / "images", tmp_path / "state/cache"
    for number in range(6):
        write(place, f"ill/{number}.png", number)
    with nothing_downloaded(images):
        for files in (6, 5):
            assert len(data.load("folder", place).train) == files - 1
            (place / f"ill/{files - 1}.png").unlink()
            LOADED.clear()
    assert len([*images.rglob("*.safetensors")]) == 1


def test_a_cache_that_cannot_be_read_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        write(tmp_path, f"images/ill/{number}.png", number)

    def denied(path: Path) -> None:
        raise PermissionError(f"{path} belongs to another user")

    monkeypatch.setattr("fedhet.data.files.read_tensors", denied)
    with nothing_downloaded(tmp_path / "cache"):
        assert len(data.load("folder", tmp_path / "images").train) == 5


def test_all_classes_are_listed(tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path, f"b/{number}.png", number)
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    dataset = data.load("folder", tmp_path)
    assert (dataset.classes, dataset.train.labels.tolist(), dataset.test.labels.tolist()) == (3, [1] * 4, [1])


def test_table_keeps_patients_together(tmp_path: Path) -> None:
    rows = ["file,label,patient,,"]  # as a spreadsheet may write it
    for number in range(20):
        write(tmp_path, f"{number}.png", number)
        rows.append(f"{number}.png,{'ab'[number % 2]},{number // 2:02},,")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    dataset = data.load("folder", tmp_path)
    assert dataset.test.inputs[:, 0, 0, 0].tolist() == [8, 9, 18, 19]
    assert dataset.together is not None
    assert torch.bincount(torch.from_numpy(dataset.together.train)).tolist() == [2, 2, 2, 2, 0, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("files", "text", "words"),
    [
        ([], "", "must have subfolders of images by class, or labels.csv"),
        (["a/1.png"], "", "too few images for training and tests"),
        (["train/a/1.png", "test/b/1.png"], "", "move their subfolders by class"),
        (["1.png"], "file,class\n1.png,a", "with columns file and label"),
        (["1.png"], "file,label\n1.png,", "without empty cells"),
        (["1.png"], "\n", "its first line has no columns"),
        (["1.png"], "file;label\n1.png;a", "its first line has 'file;label'"),
        (["1.png"], "file,label,label\n1.png,a,b", "none twice, but its first line has 'file', 'label', 'label'"),
        (["1.png"], "file,label\n1.png,pneumonia, left", "2 cells in each row, but row 1 has not"),
        (["1.png"], "file,label\n1.png", "2 cells in each row, but row 1 has not"),
        (["1.png"], "file,label\n1.png,a\n./1.png,b", "names './1.png' twice"),
        (["1.png"], 'file,label\n1.png,"a\n1.png,a\n', "unexpected end of data"),
        (["1.png"], "file,label\n1.png,\udce4" + "a" * 5000, "decode byte 0xe4 in position 17: invalid"),
    ],
)
def test_faults_are_named(files: list[str], text: str, words: str, tmp_path: Path) -> None:
    for name in files:
        write(tmp_path, f"{name}.png")
        (tmp_path / f"{name}.png").rename(tmp_path / name)
    if text:
        (tmp_path / "labels.csv").write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match=words) as told:
        data.load("folder", tmp_path)
    assert len(str(told.value)) < 400, "it does not quote the table"


@pytest.mark.parametrize("name", ["../other.png", "/etc/passwd", "pipe.png", "none.png", "", "\0.png", "a" * 5000])
def test_a_table_names_files_below_its_folder(name: str, tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path, f"images/{number}.png")
    write(tmp_path, "other.png")
    os.mkfifo(tmp_path / "images" / "pipe.png")
    rows = ["file,label", *(f"{number}.png,ill" for number in range(5)), f"{name},ill"]
    (tmp_path / "images" / "labels.csv").write_text("\n".join(rows))
    with pytest.raises(DataError, match=r"labels\.csv names .* which is no file below"):
        data.load("folder", tmp_path / "images")


def test_an_image_of_too_many_pixels_and_names_in_another_encoding_are_refused(tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path, f"ill/{number}.png")
    (tmp_path / "classes.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"classes\.txt must have the names of classes in UTF-8"):
        data.load("folder", tmp_path)
    (tmp_path / "classes.txt").write_text("ill\nwell\nwell\n")
    with pytest.raises(DataError, match="names the class 'well' twice"):
        data.load("folder", tmp_path)
    (tmp_path / "classes.txt").unlink()
    size = struct.pack(">II", 20000, 20000)
    header = b"IHDR" + size + b"\x08\0\0\0\0"
    sum_of = struct.pack(">I", zlib.crc32(header))
    (tmp_path / "ill" / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\x0d" + header + sum_of)
    with pytest.raises(DataError, match=r"bomb\.png cannot be read as an image"):
        data.load("folder", tmp_path)


def test_a_class_that_is_not_listed_and_deep_pixels_are_refused(tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path / "one", f"a/{number}.png")
        write(tmp_path / "deep", f"a/{number}.png")
    (tmp_path / "one/classes.txt").write_text("b")
    with pytest.raises(DataError, match="images of class 'a', which .*classes.txt does not name"):
        data.load("folder", tmp_path / "one")
    Image.fromarray(np.full((4, 6), 3000, np.uint16)).save(tmp_path / "deep/a/4.png")
    with pytest.raises(DataError, match="more than 8 bits"):
        data.load("folder", tmp_path / "deep")


def test_clients_report_names_of_classes(tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path, f"ill/{number}.png", number)
        write(tmp_path, f"healthy/{number}.png", number)
    config = configuration.resolve({"method": "local", "dataset": "folder", "data": str(tmp_path)})
    info = ClientInfo("north", None, 1, config)
    client = client_setup.data_of(info)
    assert client.names == {"classes": ("healthy", "ill")}
    assert client.aligned({"classes": ("ill", "healthy")}).train.labels.tolist() == [1] * 4 + [0] * 4


def test_a_network_is_loaded_where_its_images_are_not(tmp_path: Path) -> None:
    """The coordinator of nodes has no images."""
    for number in range(20):
        write(tmp_path / "data", f"ill/{number}.png", 6 * number)
        write(tmp_path / "data", f"well/{number}.png", 6 * number)
    keys = {"method": "fedavg", "dataset": "folder", "data": str(tmp_path / "data"), "clients": 2, "rounds": 1}
    keys |= {"architectures": "mlp", "input-size": 8, "public-samples": 0, "samples-per-client": 0, "partition": "iid"}
    run = fedhet.run(keys, out=tmp_path / "run", progress=False)
    with_images = fedhet.load_model(run, 0).state_dict()
    LOADED.clear()
    shutil.rmtree(tmp_path / "data")
    network = fedhet.load_model(run, 0)
    assert network(torch.zeros(1, 3, 8, 8)).shape == (1, 2)
    torch.testing.assert_close(dict(network.state_dict()), dict(with_images))

import gzip
import lzma
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from fedhet import data
from fedhet.data import files, text
from fedhet.data.images import grey
from fedhet.errors import DataError

RNG = np.random.default_rng(0)


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{values.ndim}i", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_mnist(folder: Path, train: int = 30, test: int = 20, suffix: str = "") -> dict[str, np.ndarray]:
    folder.mkdir(parents=True)
    arrays = {
        "train-images-idx3-ubyte": RNG.integers(256, size=(train, 28, 28), dtype=np.uint8),
        "train-labels-idx1-ubyte": RNG.integers(10, size=train, dtype=np.uint8),
        "t10k-images-idx3-ubyte": RNG.integers(256, size=(test, 28, 28), dtype=np.uint8),
        "t10k-labels-idx1-ubyte": RNG.integers(10, size=test, dtype=np.uint8),
    }
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    for name, values in arrays.items():
        (folder / (name + suffix)).write_bytes(pack(idx(values)))
    return arrays


class TestMnist:
    @pytest.mark.parametrize(("place", "suffix"), [("", ""), ("MNIST/raw", ".gz"), ("mnist/MNIST/raw", ".xz")])
    def test_layouts(self, tmp_path: Path, place: str, suffix: str) -> None:
        arrays = write_mnist(tmp_path / "root" / place, suffix=suffix)
        dataset = data.load("mnist", tmp_path / "root")
        assert (len(dataset.train), len(dataset.test), dataset.input_shape) == (30, 20, (1, 28, 28))
        assert np.array_equal(dataset.train.inputs[:, 0].numpy(), arrays["train-images-idx3-ubyte"])
        assert np.array_equal(dataset.test.labels.numpy(), arrays["t10k-labels-idx1-ubyte"])
        assert (dataset.train.inputs.dtype, dataset.train.labels.dtype) == (torch.uint8, torch.int64)

    def test_clothing_is_not_taken_for_digits(self, tmp_path: Path) -> None:
        write_mnist(tmp_path / "MNIST" / "raw")
        with pytest.raises(DataError, match="FashionMNIST"):
            data.load("fashion-mnist", tmp_path)
        arrays = write_mnist(tmp_path / "FashionMNIST" / "raw", train=31, suffix=".gz")
        dataset = data.load("fashion-mnist", tmp_path)
        assert (dataset.name, len(dataset.train), dataset.input_shape) == ("fashion-mnist", 31, (1, 28, 28))
        assert np.array_equal(dataset.train.inputs[:, 0].numpy(), arrays["train-images-idx3-ubyte"])
        assert len(data.load("mnist", tmp_path).train) == 30

    @pytest.mark.parametrize(
        ("file", "content", "message"),
        [
            ("t10k-images-idx3-ubyte", idx(np.zeros((20, 28, 28), np.uint8))[:-1], "has 15679 values, but its"),
            ("t10k-images-idx3-ubyte", b"<html>not found</html>", "not an idx file of bytes"),
            ("t10k-images-idx3-ubyte", idx(np.zeros((20, 27, 28), np.uint8)), "images must be 28 x 28"),
            ("t10k-labels-idx1-ubyte", idx(np.zeros(19, np.uint8)), "with labels"),
            ("t10k-labels-idx1-ubyte", idx(np.full(20, 10, np.uint8)), "must have labels from 0 to 9"),
        ],
    )
    def test_damage_is_named(self, tmp_path: Path, file: str, content: bytes, message: str) -> None:
        write_mnist(tmp_path / "MNIST" / "raw")
        (tmp_path / "MNIST" / "raw" / file).write_bytes(content)
        with pytest.raises(DataError, match=message) as raised:
            data.load("mnist", tmp_path)
        assert "t10k" in str(raised.value)

    def test_missing_files_and_folders(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"nowhere does not exist"):
            data.load("mnist", tmp_path / "nowhere")
        with pytest.raises(DataError, match=r"no MNIST in .*put train-images-idx3-ubyte"):
            data.load("mnist", tmp_path)
        write_mnist(tmp_path / "MNIST" / "raw")
        labels = tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
        content = labels.read_bytes()
        labels.unlink()
        with pytest.raises(DataError, match="incomplete: add t10k-labels-idx1-ubyte"):
            data.load("mnist", tmp_path)
        labels.with_name(labels.name + ".gz").write_bytes(gzip.compress(content)[:-10])
        with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz is damaged"):
            data.load("mnist", tmp_path)

    def test_downloads(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        datasets = pytest.importorskip("torchvision.datasets")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(data.examples, "LOADED", {})

        def refused(root: Path, download: bool) -> None:
            assert (Path(root), download) == (tmp_path / "fedhet", True)
            raise RuntimeError("no\nnetwork")

        monkeypatch.setattr(datasets, "MNIST", refused)
        with pytest.raises(DataError, match=r"cannot be downloaded \(no network\).*--data DIR"):
            data.load("mnist")
        monkeypatch.setattr(datasets, "MNIST", lambda root, download: write_mnist(root / "MNIST" / "raw", train=7))
        assert len(data.load("mnist").train) == 7


class TestCifar:
    def test_images_and_labels(self, stand_ins: str) -> None:
        ten, hundred = (data.load(name, stand_ins) for name in ("cifar10", "cifar100"))
        assert (len(ten.train), len(ten.test), ten.classes) == (200, 10, 10)
        assert (len(hundred.train), len(hundred.test), hundred.classes) == (400, 100, 100)
        assert ten.train.labels[:80].tolist() == [label % 10 for label in range(40)] * 2
        assert hundred.test.labels.tolist() == list(range(100))
        assert ten.input_shape == hundred.input_shape == (3, 32, 32)
        assert ten.augment is not None

    def test_published_python_2_pickles(self, tmp_path: Path) -> None:
        # What Python 2 and the NumPy of 2009 wrote: byte strings, and the module name `numpy.core.multiarray`.
        content = (
            b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U"
            b"\x01b\x87Rq\x05(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ"
            b"\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x18\x00\x00" + bytes([200]) * 6144 + b"tbU\x06labels"
            b"]q\x08(K\x03K\x07eu."
        )
        (tmp_path / "data_batch_1").write_bytes(content)
        images, labels = files.read_cifar(tmp_path / "data_batch_1")
        assert images.shape == (2, 3, 32, 32)
        assert images.unique().tolist() == [200]
        assert labels.tolist() == [3, 7]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (
                pickle.dumps({"data": np.zeros((2, 3071), np.uint8), "labels": [1, 2]}, 2),
                r"must have \(n, 3072\) uint8",
            ),
            (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 10]}, 2), "labels from 0 to 9"),
            (pickle.dumps({"data": np.zeros((2, 3072), np.uint8)}, 2), "'labels' is missing"),
            (b"\x80\x02}q\x01", "is no batch of CIFAR's Python version"),
        ],
    )
    def test_damage_is_named(self, tmp_path: Path, content: bytes, message: str) -> None:
        (tmp_path / "data_batch_3").write_bytes(content)
        with pytest.raises(DataError, match=f"data_batch_3.*{message}"):
            files.read_cifar(tmp_path / "data_batch_3")

    def test_pickles_cannot_run_anything(self, tmp_path: Path) -> None:
        class Harmful:
            def __reduce__(self) -> tuple[object, ...]:
                return os.mkdir, (str(tmp_path / "harm"),)

        (tmp_path / "data_batch_1").write_bytes(pickle.dumps({"data": Harmful()}))
        with pytest.raises(DataError, match=r"the file has (posix|nt)\.mkdir"):
            files.read_cifar(tmp_path / "data_batch_1")
        assert not (tmp_path / "harm").exists()


def test_domains_of_grey_and_colourful_images(stand_ins: str) -> None:
    dataset, balanced = (data.load(name, stand_ins) for name in ("cifar10-domains", "cifar10-domains-balanced"))

    def grey_shares(examples: data.Examples) -> list[float]:
        images = (examples.inputs[examples.labels == label].float() for label in range(10))
        return [round((each.std(1).amax((1, 2)) == 0).float().mean().item(), 2) for each in images]

    shares = grey_shares(dataset.train)
    assert sorted(shares) == [0.05] * 5 + [0.95] * 5
    assert grey_shares(balanced.train) == [0.5] * 10
    assert torch.equal(dataset.train.labels, data.load("cifar10", stand_ins).train.labels)
    parts = data.partition(dataset, "natural", clients=2, seed=0)
    for part, share in zip(parts, (0.95, 0.05), strict=True):
        labels = {*dataset.train.labels[part.train].tolist(), *dataset.test.labels[part.test].tolist()}
        assert labels == {label for label in range(10) if shares[label] == share}
    image = torch.tensor([255, 0, 100], dtype=torch.uint8).view(1, 3, 1, 1)
    assert grey(image).flatten().tolist() == [round(0.299 * 255 + 0.114 * 100)] * 3, "luminance"


COMPLETE = """\
<<THIS ELECTRONIC VERSION. IT IS
  COMMERCIALLY. Distributed
>>

1609

THE SONNETS

by William Shakespeare

  That time of year. thou mayst in me behold,
    Bare ruined choirs. Late

1604

THE TRAGEDY OF TESTS

by William Shakespeare

  Ham. To be, or not to be: that
    is the   question.
                                Exit
  QUEEN MAB. Good night.

  HAM. Words, words.

1593

THE COMEDY OF ERRORS

by William Shakespeare

ACT I. SCENE 1

AEGEON. Proceed, Solinus,
  And by the doom
of death.
<<A NOTICE.
>>
HAM. Another one.
"""


class TestShakespeare:
    def test_complete_works(self) -> None:
        said = {role: " ".join(" ".join(lines).split()) for role, lines in text.speeches(COMPLETE).items()}
        assert said == {
            "THE TRAGEDY OF TESTS: HAM": "To be, or not to be: that is the question. Exit Words, words.",
            "THE TRAGEDY OF TESTS: QUEEN MAB": "Good night.",
            "THE COMEDY OF ERRORS: AEGEON": "Proceed, Solinus, And by the doom of death.",
            "THE COMEDY OF ERRORS: HAM": "Another one.",
        }

        with pytest.raises(DataError, match="the text has no plays"):
            text.speeches(COMPLETE.replace("William", "Will"))

    def test_vocabulary_is_leafs(self) -> None:
        assert len(text.CHARACTERS) == len(set(text.CHARACTERS)) == 80
        assert "".join(text.CHARACTERS[code] for code in text.encode("O  what,\n me?")) == "O what, me?"
        assert text.encode("$é{\N{SNOWMAN}").tolist() == [79, 79, 79, text.CHARACTERS.index("?")]

    def write(self, folder: Path, characters: dict[str, int], suffix: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        letters = np.frombuffer(b"abcdefghij klm", np.uint8)
        lines = [f"  {role}. {RNG.choice(letters, size=n).tobytes().decode()}" for role, n in characters.items()]
        content = "\n\n".join(["A PLAY", "by William Shakespeare", *lines]).encode()
        pack = {"": bytes, ".xz": lzma.compress}[suffix]
        (folder / f"t8.shakespeare.txt{suffix}").write_bytes(pack(content))

    @pytest.mark.parametrize(("place", "suffix"), [("", ""), ("shakespeare", ".xz")])
    def test_windows_and_natural_partition(self, tmp_path: Path, place: str, suffix: str) -> None:
        self.write(tmp_path / place, {"A": 2000, "B": 900, "C": 3000}, suffix)
        dataset = text.shakespeare(tmp_path, min_characters=1500)
        assert dataset.groups is not None
        assert np.unique(dataset.groups.train).tolist() == [0, 1]  # A and C
        assert (dataset.classes, dataset.input_shape, dataset.task.name) == (80, (80,), "next-character")
        assert dataset.train.inputs.shape == (len(dataset.groups.train), 80)
        # Windows move by one character: each label is the last character of the next window.
        first = dataset.groups.train[:-1] == dataset.groups.train[1:]
        assert torch.equal(dataset.train.labels[:-1][first], dataset.train.inputs[1:, -1][first].long())
        assert torch.equal(dataset.train.inputs[:-1, 1:][first], dataset.train.inputs[1:, :-1][first])
        parts = data.partition(dataset, "natural", clients=2, seed=0)
        for part, characters in zip(parts, (2000, 3000), strict=True):
            # White space is merged, so that a role has a few characters less.
            assert 0.7 * characters < len(part.train) + 80 <= 0.8 * characters
            assert 0.15 * characters < len(part.test) + 80 <= 0.2 * characters + 1
        batch = dataset.transform(dataset.train.inputs[:3])
        assert batch.dtype == torch.int64

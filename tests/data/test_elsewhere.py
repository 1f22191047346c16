"""A public dataset of another data set's images."""

import pytest
import torch

from fedhet import data
from fedhet.config import client_setup, configuration
from fedhet.data import DataSet, Examples
from fedhet.errors import DataError
from fedhet.methods.options import Config
from fedhet.tasks import Task


def images_of(pixels: torch.Tensor, *, classes: int = 10, white: int = 255, name: str = "other") -> DataSet:
    """A data set of these raw images, whose classes come one after the other."""
    examples = Examples(pixels, torch.arange(len(pixels)) % classes)
    shape = tuple(pixels.shape[1:])
    return DataSet(name, examples, examples, classes, Task("classification"), shape, torch.Tensor.float, white=white)


def test_images_are_converted():
    white = torch.full((40, 3, 28, 28), 255, dtype=torch.uint8)
    white[::2] = 0  # the even classes are black
    public = data.public_dataset_of(images_of(white), data.load("digits"), 20, seed=0)
    assert public.inputs.shape == (20, 1, 8, 8)
    assert public.inputs.dtype == torch.uint8
    assert public.labels is not None
    assert torch.equal(public.inputs.amax(dim=(1, 2, 3)) == 16, public.labels % 2 == 1)
    again = data.public_dataset_of(images_of(white), data.load("digits"), 20, seed=0)
    assert again.digest == public.digest


def test_labels_of_other_classes_are_dropped():
    public = data.public_dataset_of(images_of(torch.zeros(40, 1, 8, 8), classes=4), data.load("digits"), 20, seed=0)
    assert public.labels is None


def test_other_inputs_are_refused():
    words = images_of(torch.zeros(40, 80), name="words")
    with pytest.raises(DataError, match="words has no images"):
        data.public_dataset_of(words, data.load("digits"), 20, seed=0)


def test_nothing_is_held_out_for_another_data_sets_images(monkeypatch):
    elsewhere = images_of(torch.randint(0, 256, (300, 1, 28, 28), dtype=torch.uint8))
    load = data.load
    monkeypatch.setattr(
        data, "load", lambda name, *args, **kw: elsewhere if name == "mnist" else load(name, *args, **kw)
    )
    settings = {"method": "fedharm", "dataset": "digits", "clients": 4, "public-samples": 101, "seed": 77}
    held, other = (configuration.resolve(settings | more) for more in ({}, {"public-dataset": "mnist"}))

    def examples(config: Config) -> int:
        return sum(len(client_setup.data_of(client_setup.ClientInfo(str(i), i, 4, config)).train) for i in range(4))

    public = client_setup.public_dataset(other)
    assert public is not None
    assert len(public) == 101
    assert examples(other) - examples(held) == 101

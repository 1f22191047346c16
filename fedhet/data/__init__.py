"""Data sets by name, and how they are shared out among clients."""

from fedhet.data import chestxray, images, text, tweets
from fedhet.data.examples import ClientData, DataSet, Examples, Owners, PublicDataset, resident
from fedhet.data.partitions import Part, partition, partitions
from fedhet.data.registry import LOADED, augments, load, names, register_dataset
from fedhet.data.split import (
    Split,
    hold_out,
    public_dataset_of,
    split,
    with_drawn_test_part,
    with_drawn_test_set,
    with_validation,
)

__all__ = [
    "LOADED",
    "ClientData",
    "DataSet",
    "Examples",
    "Owners",
    "Part",
    "PublicDataset",
    "Split",
    "augments",
    "chestxray",
    "hold_out",
    "images",
    "load",
    "names",
    "partition",
    "partitions",
    "public_dataset_of",
    "register_dataset",
    "resident",
    "split",
    "text",
    "tweets",
    "with_drawn_test_part",
    "with_drawn_test_set",
    "with_validation",
]

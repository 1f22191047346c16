"""Data sets by name, data of users, and partitions of data among clients."""

from fedhet.data import chestxray, folder, images, text
from fedhet.data.examples import ClientData, DataSet, Examples, PublicDataset, resident
from fedhet.data.partitions import (
    Part,
    hold_out,
    partition,
    partitions,
    proportional_sample,
    with_drawn_test_set,
    with_validation,
)
from fedhet.data.registry import LOADED, keys_without_effect, load, names, register_dataset

__all__ = ["LOADED", "ClientData", "DataSet", "Examples", "Part", "PublicDataset", "chestxray", "folder", "images"]
__all__ += ["hold_out", "keys_without_effect", "load", "names", "partition", "partitions", "proportional_sample"]
__all__ += ["register_dataset", "resident", "text", "with_drawn_test_set", "with_validation"]

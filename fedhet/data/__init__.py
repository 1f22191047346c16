"""Data sets by name, data of users, and partitions of data among clients."""

from fedhet.data import chestxray, folder, images, text
from fedhet.data.examples import (
    LOADED,
    UNLABELLED,
    Augment,
    ClientData,
    DataSet,
    Examples,
    PublicDataset,
    keys_without_effect,
    load,
    names,
    register_dataset,
    resident,
)
from fedhet.data.partitions import (
    Part,
    hold_out,
    partition,
    partitions,
    proportional_sample,
    with_drawn_test_set,
    with_validation,
)

__all__ = ["LOADED", "UNLABELLED", "Augment", "ClientData", "DataSet", "Examples", "Part", "PublicDataset"]
__all__ += ["chestxray", "folder", "hold_out", "images", "keys_without_effect", "load", "names", "partition"]
__all__ += ["partitions", "proportional_sample", "register_dataset", "resident", "text", "with_drawn_test_set"]
__all__ += ["with_validation"]

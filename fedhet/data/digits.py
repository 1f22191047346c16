"""scikit-learn's handwritten digits: real data that is always there."""

from pathlib import Path

import torch

from fedhet.data.examples import DataSet, Examples
from fedhet.data.registry import register_dataset
from fedhet.data.transforms import Normalise
from fedhet.errors import DataError
from fedhet.task import get_task


@register_dataset("digits")
def digits(folder: Path | None) -> DataSet:
    """1,797 grey images of 8 x 8 of 10 digits (UCI, 1998), embedded in scikit-learn.

    The split is ours, the same in every run: of each digit, every fifth image in the order of the file is for testing
    (355), the others (1,442) for training. The file is in the order of the writers, so most of them are in both parts.

    Raises:
        DataError: The installed scikit-learn lacks its data.
    """
    from sklearn.datasets import load_digits  # it takes a second, which only this data set needs

    try:
        images, digit = load_digits(return_X_y=True)
    except OSError as error:
        raise DataError(f"scikit-learn's embedded digits cannot be read ({error}): reinstall scikit-learn") from error
    examples = Examples(torch.tensor(images, dtype=torch.uint8).view(-1, 1, 8, 8), torch.tensor(digit))
    occurrence = (torch.nn.functional.one_hot(examples.labels).cumsum(0)).gather(1, examples.labels[:, None])[:, 0]
    test = occurrence % 5 == 0
    return DataSet(
        name="digits",
        train=examples.subset(torch.nonzero(~test)[:, 0]),
        test=examples.subset(torch.nonzero(test)[:, 0]),
        classes=10,
        task=get_task("classification"),
        input_shape=(1, 8, 8),
        transform=Normalise(16.0),
        white=16,
    )

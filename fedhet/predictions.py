"""Files of simulations on the test examples that models predict right; deployed nodes have none."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedhet.files import name_of, read_arrays, write_arrays

FOLDER = "predictions"
GLOBAL = "global"
"""The file of a global model that the server evaluates; the others are named by their clients."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """The test examples of a model.

    Attributes:
        examples: a number (n,) int64 for each by which it is known in other runs, see `fedhet.data.digests`.
        right: whether each is predicted right, (n,) bool.
        weight: how much the client counts, by its own test examples; 1 for a global model.
    """

    examples: NDArray[np.int64]
    right: NDArray[np.bool_]
    weight: int

    def write(self, path: Path) -> None:
        """Write a file."""
        write_arrays(path, {"examples": self.examples, "right": self.right, "weight": np.array(self.weight)})

    @classmethod
    def read(cls, path: Path) -> "Predictions":
        """Read a file; a `FedhetError` if it is damaged."""
        arrays, _ = read_arrays(path)
        return cls(arrays["examples"], arrays["right"], int(arrays["weight"]))


def read_predictions(folder: Path) -> dict[str, Predictions]:
    """Read the predictions of a run's directory, by client; empty if it has none."""
    return {name_of(path.stem): Predictions.read(path) for path in sorted((folder / FOLDER).glob("*.safetensors"))}

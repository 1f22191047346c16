"""The average of last layers, which are not matched: their outputs are the classes, the same for every client."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def class_weighted_average(
    weights: Sequence[npt.ArrayLike], class_counts: npt.ArrayLike, axis: int = 0
) -> npt.NDArray[np.float64]:
    """Averages last layers, each class by how many of its examples every client holds (FedMA, section 3).

    Args:
        weights: One array per client, all of the same shape, in the global order of their inputs.
        class_counts: (J, C), the number of examples of each class at each client.
        axis: The axis of the classes: 0 for a `torch.nn.Linear`'s weight (C, inputs) and bias (C,).

    Returns:
        float64, the clients' shape; zeros for a class that no client holds.

    Raises:
        ValueError: Shapes differ among clients or from the counts, or a count is negative.
    """
    shapes = {np.shape(layer) for layer in weights}
    if len(shapes) != 1:
        raise ValueError(f"last layers must have one shape, got {sorted(shapes)}")
    stacked = np.stack([np.asarray(layer, dtype=np.float64) for layer in weights])
    counts = np.asarray(class_counts, dtype=np.float64)
    classes = stacked.shape[1:][axis]
    if counts.shape != (len(stacked), classes):
        raise ValueError(f"class_counts must be ({len(stacked)} clients, {classes} classes), got {counts.shape}")
    if (counts < 0).any():
        raise ValueError("class_counts must not be negative")
    total = counts.sum(axis=0)
    shares = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
    averaged = np.einsum("jc,jc...->c...", shares, np.moveaxis(stacked, axis % (stacked.ndim - 1) + 1, 1))
    return np.moveaxis(averaged, 0, axis)

"""Kinds of outputs: for each the loss, the metric, and which outputs and labels belong to it.

A user names one (`fedhet.Task`), or outputs and labels decide (`infer`).
"""

from torch import Tensor

from fedhet.outputs.classes import IGNORED as IGNORED
from fedhet.outputs.classes import Binary, Classification, NextCharacter, Segmentation, TokenClassification
from fedhet.outputs.kind import Columns as Columns
from fedhet.outputs.kind import Outputs as Outputs
from fedhet.outputs.kind import zeros_and_ones
from fedhet.outputs.vectors import MultiLabel, Regression

OUTPUTS: dict[str, Outputs] = {
    kind.name: kind
    for kind in (
        Classification(),
        Binary(),
        MultiLabel(),
        NextCharacter(),
        TokenClassification(),
        Segmentation(),
        Regression(),
    )
}


def infer(outputs: Tensor, labels: Tensor) -> str:
    """The name of the kind that outputs of a few examples and labels of all seem to be of.

    One output an example and labels of 0 and 1 are binary; several labels of 0 and 1 an example, and as many outputs,
    are labels. A class for each token, or for each pixel, is known by the axes of outputs and labels. Other floats are
    targets, all else classes. `Outputs.problem` says whether they can be.
    """
    known, one_each = zeros_and_ones(labels), labels.numel() == len(labels)
    if known and one_each and len(outputs) and outputs[0].numel() == 1:
        return "binary"
    if known and labels.ndim == 2 and not one_each and outputs.shape[1:] == labels.shape[1:]:
        return "multi-label"
    whole = known or not labels.is_floating_point()
    if whole and labels.ndim > 1 and outputs.ndim == labels.ndim + 1:
        if outputs.ndim == 3 and outputs.shape[1] == labels.shape[1]:
            return "token-classification"
        if outputs.shape[2:] == labels.shape[1:]:
            return "segmentation"
    return "regression" if labels.is_floating_point() else "classification"

"""Kinds of outputs, each with its loss and metric. A user names one (`fedhet.Task`), or it is inferred."""

from torch import Tensor

from fedhet.tasks.classes import IGNORED as IGNORED
from fedhet.tasks.classes import Binary, Classification, NextCharacter, Segmentation, TokenClassification
from fedhet.tasks.kind import Columns as Columns
from fedhet.tasks.kind import Outputs as Outputs
from fedhet.tasks.kind import zeros_and_ones
from fedhet.tasks.vectors import MultiLabel, Regression

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
    """Infer the name of the kind from outputs of a few examples and labels of all; `Outputs.problem` checks the rest.

    One output per example and labels of 0 and 1 are binary. Several labels of 0 and 1 with as many outputs are
    multi-label. Classes of tokens and pixels are recognised by the axes. Other floats are targets, other integers
    classes.
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

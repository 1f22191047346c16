"""Representations of networks: features and heads, CKA, and the peers' target that FedHeNN aligns a client with."""

from fedhet.representations.alignment import Alignment, Rows
from fedhet.representations.cka import debiased_linear_cka, linear_cka, procrustes_distance
from fedhet.representations.features import (
    Captured,
    Capturing,
    Output,
    RandomStream,
    Representation,
    head_name,
    isolated,
)

__all__ = [
    "Alignment",
    "Captured",
    "Capturing",
    "Output",
    "RandomStream",
    "Representation",
    "Rows",
    "debiased_linear_cka",
    "head_name",
    "isolated",
    "linear_cka",
    "procrustes_distance",
]

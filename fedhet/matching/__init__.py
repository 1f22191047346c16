"""Matching the neurons of networks that were trained apart (FedMA and PFNM)."""

from .averaging import average_rest, class_weighted_average
from .groups import GroupMatch, Matching, assemble, match_group, match_networks, patch
from .layer import LayerMatch, attach, estimate_variances, match_layer
from .structure import describe, due, parameters_of, rest_of, understand

__all__ = [
    "GroupMatch",
    "LayerMatch",
    "Matching",
    "assemble",
    "attach",
    "average_rest",
    "class_weighted_average",
    "describe",
    "due",
    "estimate_variances",
    "match_group",
    "match_layer",
    "match_networks",
    "parameters_of",
    "patch",
    "rest_of",
    "understand",
]

"""Matching the neurons of networks that were trained apart (FedMA and PFNM)."""

from .averaging import class_weighted_average
from .layer import LayerMatch, attach, match_layer
from .variances import Variances, estimate_variances

__all__ = [
    "LayerMatch",
    "Variances",
    "attach",
    "class_weighted_average",
    "estimate_variances",
    "match_layer",
]

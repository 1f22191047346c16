"""Matching of the neurons of separately trained networks (FedMA and PFNM)."""

from fedhet.algorithms.matching.bbp_map import LayerMatch, match_layer
from fedhet.algorithms.matching.groups import Matching, assemble, due, groups_from_json, groups_to_json, patch

__all__ = ["LayerMatch", "Matching", "assemble", "due", "groups_from_json", "groups_to_json", "match_layer", "patch"]

"""Matching of the neurons of separately trained networks (FedMA and PFNM)."""

from fedhet.algorithms.matching.bbp_map import LayerMatch as LayerMatch
from fedhet.algorithms.matching.bbp_map import match_layer as match_layer
from fedhet.algorithms.matching.groups import Matching as Matching
from fedhet.algorithms.matching.groups import assemble as assemble
from fedhet.algorithms.matching.groups import average_rest as average_rest
from fedhet.algorithms.matching.groups import due as due
from fedhet.algorithms.matching.groups import groups_from_json as groups_from_json
from fedhet.algorithms.matching.groups import groups_to_json as groups_to_json
from fedhet.algorithms.matching.groups import match_group as match_group
from fedhet.algorithms.matching.groups import match_networks as match_networks
from fedhet.algorithms.matching.groups import patch as patch

"""Matching the neurons of networks that were trained apart (FedMA and PFNM)."""

from fedhet.matching.averaging import average_rest as average_rest
from fedhet.matching.averaging import class_weighted_average as class_weighted_average
from fedhet.matching.groups import GroupMatch as GroupMatch
from fedhet.matching.groups import Matching as Matching
from fedhet.matching.groups import assemble as assemble
from fedhet.matching.groups import match_group as match_group
from fedhet.matching.groups import match_networks as match_networks
from fedhet.matching.groups import patch as patch
from fedhet.matching.layer import LayerMatch as LayerMatch
from fedhet.matching.layer import attach as attach
from fedhet.matching.layer import estimate_variances as estimate_variances
from fedhet.matching.layer import match_layer as match_layer
from fedhet.matching.structure import describe as describe
from fedhet.matching.structure import due as due
from fedhet.matching.structure import parameters_of as parameters_of
from fedhet.matching.structure import rest_of as rest_of
from fedhet.matching.structure import understand as understand

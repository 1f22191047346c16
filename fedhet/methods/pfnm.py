"""PFNM (Yurochkin et al., ICML 2019)."""

from dataclasses import dataclass

from fedhet.method import Method, Traits
from fedhet.sharing import EVERYTHING

from ._matching import COMMON, DRAWINGS, TELLS, MatchingParameters


@dataclass(frozen=True)
class PFNMParameters(MatchingParameters):
    """PFNM's own keys: those of matching."""


method = Method(
    "pfnm",
    traits=Traits(networks="widths", shares=EVERYTHING.with_statistics(), together=True, combined="whole", tells=TELLS),
    Parameters=PFNMParameters,
    server="fedhet.strategies.pfnm:PFNM",
    client="fedhet.client_apps.pfnm:PFNM",
    common={**COMMON, "rounds": 1},
    drawings=DRAWINGS,
)

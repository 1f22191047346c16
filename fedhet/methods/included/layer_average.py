"""Averages of single layers over clients whose networks differ, by layer type and order, or of common first layers.

The common first layers are FlexiFed's (Wang et al., "FlexiFed: Personalized Federated Learning for Edge Clients with
Heterogeneous Model Architectures", WWW 2023), whose authors compare layers by name and position; here they are alike if
class, options and shapes are. Layers are taken in the order in which the model defines them.
"""

from dataclasses import dataclass

from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Parameters, option
from fedhet.methods.sharing import BY_FIRST_LAYERS, BY_TYPE_AND_ORDER, WITHIN_ARCHITECTURES


@dataclass(frozen=True)
class LayerAverageParameters(Parameters):
    """The method's own keys."""

    by: str = option(
        "type-order",
        "layers averaged together: same type and order, equal first layers (FlexiFed's two), or same architecture",
        choices=("type-order", "prefix", "max-common", "architecture"),
    )


def _traits(parameters: LayerAverageParameters) -> Traits:
    shares = {"type-order": BY_TYPE_AND_ORDER, "architecture": WITHIN_ARCHITECTURES}.get(parameters.by, BY_FIRST_LAYERS)
    if parameters.by != "prefix":
        return Traits(shares=shares, common_init=True)
    return Traits(shares=shares, keeps="model", scored="trained", common_init=True, sends={"common": "weights"})


method = Method(
    "layer-average",
    traits=_traits,
    Parameters=LayerAverageParameters,
    common={"batch-norm": "re-estimate"},  # statistics of one network say nothing of another's layer
)

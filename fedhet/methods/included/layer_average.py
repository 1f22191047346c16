"""Layer average: average single layers over clients whose networks differ.

Layers are matched by type and order, or as common first layers. The latter is FlexiFed's rule (Wang et al., "FlexiFed:
Personalized Federated Learning for Edge Clients with Heterogeneous Model Architectures", WWW 2023). Its authors compare
layers by name and position; here, layers match if their class, options and shapes are equal. Layers are in the order in
which the model defines them.
"""

from dataclasses import dataclass

from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Options, option
from fedhet.methods.sharing import BY_FIRST_LAYERS, BY_TYPE_AND_ORDER, WITHIN_ARCHITECTURES


@dataclass(frozen=True)
class LayerAverageOptions(Options):
    """Layer average's own configuration keys."""

    by: str = option(
        "type-order",
        "layers averaged together: same type and order, equal first layers (FlexiFed's two), or same architecture",
        choices=("type-order", "prefix", "max-common", "architecture"),
    )


def _traits(options: LayerAverageOptions) -> Traits:
    shares = {"type-order": BY_TYPE_AND_ORDER, "architecture": WITHIN_ARCHITECTURES}.get(options.by, BY_FIRST_LAYERS)
    if options.by != "prefix":
        return Traits(shares=shares, common_init=True)
    return Traits(shares=shares, keeps="model", scored="trained", common_init=True, sends={"common": "weights"})


method = Method(
    "layer-average",
    traits=_traits,
    Options=LayerAverageOptions,
    common={"batch-norm": "re-estimate"},  # statistics of one network say nothing of another's layer
)

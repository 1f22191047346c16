"""Averages of the layers that networks of different architectures have in common.

With `by = max-common`, these are their first layers, as in FlexiFed (Wang et al., WWW 2023), whose authors compare
layers by name and position; here, layers match if class, options and shapes are equal.
"""

from dataclasses import dataclass
from typing import Literal

from fedhet.methods.sharing import BY_FIRST_LAYERS, BY_TYPE_AND_ORDER, WITHIN_ARCHITECTURES
from fedhet.server import FederatedStrategy, Options, State, Traits, method, option

MAPS = {"type-order": BY_TYPE_AND_ORDER, "architecture": WITHIN_ARCHITECTURES, "max-common": BY_FIRST_LAYERS}


@dataclass(frozen=True)
class Keys(Options):
    by: Literal["type-order", "max-common", "architecture"] = option(
        "type-order",
        "layers averaged together: same type and order, equal first layers (FlexiFed), or same architecture",
    )


@method(
    "layer-average",
    lambda keys: Traits(shares=MAPS[keys.by], common_init=True, inside=""),
    Keys,
    common={"batch-norm": "re-estimate"},  # Statistics of one network say nothing of another's layer.
)
class LayerAverage(FederatedStrategy[Keys, State]):
    """Layer averages: each layer is averaged over the networks that have a layer like it."""

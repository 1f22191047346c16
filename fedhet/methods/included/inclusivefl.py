"""InclusiveFL (Liu et al., KDD 2022): clients have the first blocks of one network, and learn from deeper clients."""

from dataclasses import dataclass

from fedhet.methods.included.depthfl import DepthOptions, traits
from fedhet.methods.method import Method
from fedhet.methods.options import option


@dataclass(frozen=True)
class InclusiveFLOptions(DepthOptions):
    """InclusiveFL's own configuration keys, with the authors' values."""

    counted = "inclusivefl.depths"

    momentum: float = option(
        0.2, "beta, the fraction of the deeper clients' update that a client's last block receives", at_least=0, below=1
    )


method = Method("inclusivefl", traits=traits, Options=InclusiveFLOptions, own={"inclusivefl.depths": "2,1"})

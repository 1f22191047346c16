"""FedRolex (Alam et al., NeurIPS 2022): clients have a window of each hidden layer, which moves on every round."""

from functools import partial

from fedhet.method import Method
from fedhet.sharing import ROLLING_UNITS

from .heterofl import HeteroFLParameters, traits

method = Method(
    "fedrolex",
    traits=partial(traits, ROLLING_UNITS),
    Parameters=HeteroFLParameters,
    server="fedhet.strategies.fedrolex:FedRolex",
    client="fedhet.client_apps.heterofl:HeteroFL",
    common={"batch-norm": "re-estimate"},  # static BatchNorm
    own={"fedrolex.widths": "1,0.25"},
)

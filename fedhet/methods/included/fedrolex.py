"""FedRolex (Alam et al., NeurIPS 2022): clients have a window of each hidden layer's units, which moves every round."""

from dataclasses import replace

from fedhet.methods.included.heterofl import TRAITS, SizedOptions
from fedhet.methods.method import Method
from fedhet.methods.sharing import ROLLING_UNITS

method = Method(
    "fedrolex",
    traits=replace(TRAITS, shares=ROLLING_UNITS),
    Options=SizedOptions,
    client="fedhet.client_apps.heterofl:HeteroFL",
    common={"batch-norm": "re-estimate"},  # static BatchNorm
    own={"fedrolex.widths": "1,0.25"},
)

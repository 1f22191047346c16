"""FedRolex (Alam et al., NeurIPS 2022): HeteroFL with other units in each round.

In round t, a client has the units t, t + 1, ... (modulo K) of the K units of each hidden layer (equation 2).
"""

from dataclasses import replace

from fedhet.methods.method import method
from fedhet.methods.sharing import ROLLING_UNITS

from .families.submodels import PARTS
from .heterofl import HeteroFL, Keys


@method(
    "fedrolex",
    replace(PARTS, shares=ROLLING_UNITS, sends={"rows": "statistics"}, inside="head"),
    Keys,
    client="fedhet.client_apps.heterofl:HeteroFL",
    common={"batch-norm": "re-estimate"},
    own={"fedrolex.widths": "1,0.25"},
)
class FedRolex(HeteroFL):
    """FedRolex: HeteroFL with a client's units shifted each round (Alam et al., NeurIPS 2022, equation 2)."""

"""FjORD (Horvath et al., NeurIPS 2021, algorithm 1): clients train their part of one network in randomly drawn widths.

f_p is the network with the first ceil(p K) of the K units of each hidden layer. In each step, client i draws a width p
from the configured widths up to its own width p_i:

    client i:  CE(f_p(x), y),    or with self-distillation    CE(f_(p_i)(x), y) + KL(f_(p_i)(x) || f_p(x))
    server:    averages each entry over the clients that have it, as in HeteroFL
"""

from dataclasses import dataclass

from fedhet.server import method, option

from .families.submodels import PARTS, SubmodelState, SubmodelStrategy
from .heterofl import Keys as WidthsKeys


@dataclass(frozen=True)
class Keys(WidthsKeys):
    distil: bool = option(True, "smaller networks learn from the outputs of the client's widest network")


@method(
    "fjord",
    PARTS,
    Keys,
    client="fedhet.client_apps.fjord:FjORD",
    common={"batch-norm": "re-estimate"},
    own={"fjord.widths": "1,0.5,0.25"},
)
class FjORD(SubmodelStrategy[Keys, SubmodelState]):
    """FjORD: averages each weight over the clients whose widest network has it (Horvath et al., NeurIPS 2021)."""

"""FjORD (Horvath et al., NeurIPS 2021): ordered dropout, so that one network works in several widths."""

from dataclasses import dataclass

from fedhet.methods.included.heterofl import SizedOptions
from fedhet.methods.method import Method, Traits
from fedhet.methods.options import option
from fedhet.methods.sharing import FIRST_UNITS


@dataclass(frozen=True)
class FjORDOptions(SizedOptions):
    """FjORD's own configuration keys, with the paper's values.

    In each training step a client draws one of `widths` up to its own.
    """

    distil: bool = option(True, "smaller networks learn from the outputs of the client's widest network")


method = Method(
    "fjord",
    traits=Traits(networks="equal", shares=FIRST_UNITS, common_init=True),
    Options=FjORDOptions,
    common={"batch-norm": "re-estimate"},
    own={"fjord.widths": "1,0.5,0.25"},
)

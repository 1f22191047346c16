"""A method of somebody else's, as a package of its own: the mean of what clients send, held back by the one before."""

from dataclasses import dataclass

from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Options, option
from fedhet.methods.sharing import EVERYTHING


@dataclass(frozen=True)
class SlowOptions(Options):
    """The method's own keys."""

    inertia: float = option(0.0, "weight of the mean before", at_least=0, at_most=1)


slow = Method(
    "slow",
    traits=Traits(networks="equal", shares=EVERYTHING, common_init=True),
    Options=SlowOptions,
    server="someone.server:Slow",
    client="someone.client:Slow",
)

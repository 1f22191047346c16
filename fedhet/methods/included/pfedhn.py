"""pFedHN (Shamsian et al., ICML 2021) for networks that differ, as in the comparisons of FLHA-GHN's paper."""

from dataclasses import dataclass, replace

from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Options, option
from fedhet.methods.sharing import TRAINED


@dataclass(frozen=True)
class PFedHNOptions(Options):
    """pFedHN's own configuration key."""

    server_learning_rate: float = option(0.01, "learning rate of the hypernetwork's Adam", above=0)


method = Method(
    "pfedhn",
    traits=Traits(
        shares=replace(TRAINED, averaged=False, units=None), other_arrays="entries", sends={"delta": "weights"}
    ),
    Options=PFedHNOptions,
    common={
        "learning-rate": 0.005,
        "momentum": 0.9,
        "weight-decay": 5e-5,
        "batch-size": 64,
        "batch-norm": "re-estimate",
    },
)

"""DepthFL (Kim et al., ICLR 2023): a client has the first d blocks of a network, with an exit (classifier) after each.

The exits, with predictions p_j, learn from the labels and from each other; p_k is a constant in the second sum:

    client i:  L = sum_j CE(p_j, y) + w(t) / (d - 1) sum_j sum_(k != j) KL(p_k || p_j)
               w(t) = exp(-5 (1 - min(t - 1, T) / T)^2) in round t, with T = `ramp-up`
    server:    averages each array over the clients that have it
"""

from dataclasses import dataclass, replace

from fedhet.server import method, option

from .families.submodels import PARTS, ByDepth, DepthKeys, SubmodelState


@dataclass(frozen=True)
class Keys(DepthKeys):
    ramp_up: int = option(
        300, "rounds until distillation's weight exp(-5 (1 - t / ramp-up)^2) is 1; 0: none", at_least=0
    )


@method(
    "depthfl",
    replace(PARTS, predicts="the mean of the client's exits"),
    Keys,
    client="fedhet.client_apps.depthfl:DepthFL",
    own={"depthfl.depths": "2,1", "depthfl.ramp-up": 0},
)
class DepthFL(ByDepth[Keys, SubmodelState]):
    """DepthFL: the network has exits (classifiers after blocks); each array is averaged over clients that have it."""

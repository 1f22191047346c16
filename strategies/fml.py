"""FML (Shen et al., 2020): each client's own network and a shared one learn from each other.

    client i:  L_own    = alpha CE(own, y)   + (1 - alpha) KL(shared || own)
               L_shared = beta CE(shared, y) + (1 - beta)  KL(own || shared)

The server averages the shared networks. The first argument of each KL is a constant.
"""

from dataclasses import dataclass

from fedhet.server import FederatedStrategy, State, method, option

from .families.small_network import SMALL_NETWORK, SmallNetworkKeys


@dataclass(frozen=True)
class Keys(SmallNetworkKeys):
    alpha: float = option(0.5, "weight of labels in the own network's loss; 1 - alpha: of scores", above=0, at_most=1)
    beta: float = option(0.5, "weight of labels in the shared network's loss; 1 - beta: scores", at_least=0, at_most=1)


@method("fml", SMALL_NETWORK, Keys, client="fedhet.client_apps.fml:FML")
class FML(FederatedStrategy[Keys, State]):
    """FML: the average of a shared network, which learns together with each client's own network."""

"""FedMRL (Yi et al., NeurIPS 2024): the heads of a shared network and of the client's own read one representation.

    client i:  R = P [Phi_shared(x), Phi_own(x)] + b
               L = CE(head_shared(R[1..d1]), y) + CE(head_own(R[1..d2]), y)
    server:    averages the shared networks

Phi_shared and Phi_own are the networks' representations of input x, of widths d1 and d2; R[1..d] are the first d
entries of R. The matrix P and bias b of the projector are trained with both networks, and stay on the client.
"""

from dataclasses import dataclass, replace

from fedhet.server import FederatedStrategy, State, method, option

from .families.small_network import SMALL_NETWORK, SmallNetworkKeys


@dataclass(frozen=True)
class Keys(SmallNetworkKeys):
    width: int = option(0, "width d1 of the shared network's representation; 0: unchanged", at_least=0, at_most=2**16)


@method(
    "fedmrl",
    replace(SMALL_NETWORK, predicts="the client's head, from both networks", inside="representation"),
    Keys,
    client="fedhet.client_apps.fedmrl:FedMRL",
)
class FedMRL(FederatedStrategy[Keys, State]):
    """FedMRL: the average of a shared network, whose representation is fused with that of each client's own network."""

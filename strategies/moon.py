"""MOON (Li et al., CVPR 2021): FedAvg whose clients' representations stay close to the received network's.

    client i:  w_i(t) = argmin_w  L_i(w) + mu l_con(w), from w(t-1)                                      (equation 5)
               l_con = -log(exp(cos(z, z_glob) / tau) / [exp(cos(z, z_glob) / tau) + exp(cos(z, z_prev) / tau)])
                                                                                                         (equation 3)

z, z_glob and z_prev are representations of an example x by the network w, the received network w(t-1), and the client's
network after its last round; the representation is the output of a projection head of two layers. The server averages
as in FedAvg.
"""

from dataclasses import dataclass

from fedhet.methods.sharing import EVERYTHING
from fedhet.server import Traits, method, option

from .families.by_class import WidthKeys
from .fedavg import FedAvg


@dataclass(frozen=True)
class Keys(WidthKeys):
    width: int = option(256, "width of the projection head; 0: no projection head", at_least=0, at_most=2**16)
    mu: float = option(1.0, "weight of the model-contrastive loss", at_least=0)
    temperature: float = option(0.5, "tau, the temperature of the model-contrastive loss", above=0)


@method(
    "moon", Traits(networks="equal", shares=EVERYTHING, common_init=True), Keys, client="fedhet.client_apps.moon:Moon"
)
class Moon(FedAvg):
    """MOON: the average of clients' networks, whose representations are compared with the last ones in training."""

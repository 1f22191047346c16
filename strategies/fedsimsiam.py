"""FedSimSiam: the server averages encoders that clients train by SimSiam (Chen and He, CVPR 2021), without labels.

    client i:  w_i(t) = argmin_w  D(p_1, z_2) / 2 + D(p_2, z_1) / 2, from w(t-1)                   (SimSiam, equation 4)
               D(p, z) = -cos(p, z), where z is a constant                                   (SimSiam, equations 1 to 3)
    server:    w(t) = sum_i n_i w_i(t) / sum_i n_i

z = g(Phi(x)) is the projection of a view x of an example, p = h(z) its prediction of the other view's projection.
Clients are evaluated by a linear classifier on Phi, which is trained on labels for this.
"""

from dataclasses import dataclass

from fedhet.server import FederatedStrategy, State, method, option

from .families.contrast import EncoderKeys, encoder_traits


@dataclass(frozen=True)
class Keys(EncoderKeys):
    width: int = option(2048, "width of the projection head and of its hidden layers", at_least=4, at_most=2**16)


@method("fedsimsiam", encoder_traits, Keys, client="fedhet.client_apps.fedsimsiam:FedSimSiam")
class FedSimSiam(FederatedStrategy[Keys, State]):
    """FedSimSiam: the average of encoders that clients train without labels, by predicting one view from another."""

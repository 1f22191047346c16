"""FedSimCLR: the server averages encoders that clients train by SimCLR (Chen et al., ICML 2020), without labels.

    client i:  w_i(t) = argmin_w  mean over the 2N views of a batch of l(k, k'), from w(t-1)
               l(k, k') = -log(exp(cos(z_k, z_k') / tau) / sum_(m != k) exp(cos(z_k, z_m) / tau))   (SimCLR, equation 1)
    server:    w(t) = sum_i n_i w_i(t) / sum_i n_i

z = g(Phi(x)) is the projection of a view x of an example, k and k' are the two views of one example. Clients are
evaluated by a linear classifier on Phi, which is trained on labels for this.
"""

from dataclasses import dataclass

from fedhet.server import FederatedStrategy, State, method, option

from .families.contrast import EncoderKeys, encoder_traits


@dataclass(frozen=True)
class Keys(EncoderKeys):
    temperature: float = option(0.5, "tau, the temperature of the contrastive loss", above=0)


@method("fedsimclr", encoder_traits, Keys, client="fedhet.client_apps.fedsimclr:FedSimCLR")
class FedSimCLR(FederatedStrategy[Keys, State]):
    """FedSimCLR: the average of encoders that clients train without labels, by comparing views of examples."""

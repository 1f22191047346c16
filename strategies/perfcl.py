"""PerFCL (Zhang et al., Pattern Recognition 2023): one extractor is averaged, another stays at the client.

    client i:  L(w) = L_i(w) + mu l(z_s; z_g, z'_s) + gamma l(z_p; z'_p, z_g)
               l(z; p, q) = -log(exp(cos(z, p) / tau) / [exp(cos(z, p) / tau) + exp(cos(z, q) / tau)])
    server:    averages the shared extractors

The client's head reads two representations of an example: z_s of the shared and z_p of the personal extractor. z_g is
that of the received shared extractor, z'_s and z'_p are those of both extractors after the client's last round. So the
shared extractor stays close to the average, and the personal one apart from it.
"""

from dataclasses import dataclass

from fedhet.methods.sharing import Sharing
from fedhet.server import FederatedStrategy, Options, State, Traits, method, option

SHARED = Sharing(lambda network: lambda name: name if name.startswith("shared.") else None)
"""The arrays of the shared extractor."""


@dataclass(frozen=True)
class Keys(Options):
    changes_heads = True
    mu: float = option(1.0, "weight of the shared extractor's contrastive loss", at_least=0)
    gamma: float = option(1.0, "weight of the personal extractor's contrastive loss", at_least=0)
    temperature: float = option(0.5, "tau, the temperature of both losses", above=0)


@method(
    "perfcl",
    Traits(networks="equal", shares=SHARED, common_init=True, predicts="the client's head, from both extractors"),
    Keys,
    client="fedhet.client_apps.perfcl:PerFCL",
)
class PerFCL(FederatedStrategy[Keys, State]):
    """PerFCL: the average of one of the clients' two extractors, which two contrastive losses keep apart."""

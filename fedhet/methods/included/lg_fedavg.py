"""LG-FedAvg: local representations, a global head (Liang et al., "Think Locally, Act Globally", 2020)."""

from fedhet.methods.method import Method, Traits
from fedhet.methods.sharing import HEAD

method = Method("lg-fedavg", traits=Traits(shares=HEAD, keeps="model", scored="trained", common_init=True))

"""LG-FedAvg (Liang et al., "Think Locally, Act Globally", 2020): local representations and a shared, averaged head."""

from fedhet.methods.method import Method, Traits
from fedhet.methods.sharing import HEAD

method = Method("lg-fedavg", traits=Traits(shares=HEAD, keeps="model", scored="trained", common_init=True))

"""FedAvg (McMahan et al., AISTATS 2017)."""

from fedhet.method import Method, Traits
from fedhet.sharing import EVERYTHING

method = Method("fedavg", traits=Traits(networks="equal", shares=EVERYTHING, common_init=True))

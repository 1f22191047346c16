"""FedAvg (McMahan et al., AISTATS 2017)."""

from fedhet.methods.method import Method, Traits
from fedhet.methods.sharing import EVERYTHING

method = Method("fedavg", traits=Traits(networks="equal", shares=EVERYTHING, common_init=True))

"""FedAvg (McMahan et al., AISTATS 2017): the server averages the weights of all clients' networks."""

from fedhet.methods.method import Method, Traits
from fedhet.methods.sharing import EVERYTHING

method = Method("fedavg", traits=Traits(networks="equal", shares=EVERYTHING, common_init=True))

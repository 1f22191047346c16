"""FedAvg (McMahan et al., AISTATS 2017)."""

from fedhet.method import Method
from fedhet.methods._averages import AveragingParameters, average_traits

method = Method(
    "fedavg",
    traits=average_traits,
    Parameters=AveragingParameters,
    server="fedhet.strategies.fedavg:FedAvg",
    client="fedhet.client_apps.fedavg:FedAvg",
)

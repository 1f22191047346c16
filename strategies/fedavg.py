"""FedAvg, server half: the clients' models are averaged by their numbers of examples (McMahan et al., AISTATS 2017)."""

from dataclasses import dataclass

from fedhet.server import FederatedStrategy


@dataclass(frozen=True)
class Parameters:
    """FedAvg has none of its own."""


class FedAvg(FederatedStrategy):
    """W(t) = sum_i n_i / n W_i(t), over the clients of round t."""

    name = "fedavg"
    Parameters = Parameters
    equal_architectures = True
    global_model = True

"""FedAvg, client side: train the received weights and return them (McMahan et al., AISTATS 2017)."""

from fedhet.client import ClientSide
from fedhet.methods.options import Parameters


class FedAvg(ClientSide[Parameters]):
    """The defaults of `ClientSide`: one phase of training, then the shared arrays are sent."""

    takes_any_loop = True

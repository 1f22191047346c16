"""FedAvg, client side: train what the server sent, send it back (McMahan et al., AISTATS 2017)."""

from fedhet.client import ClientSide
from fedhet.options import Parameters


class FedAvg(ClientSide[Parameters]):
    """The defaults of `ClientSide`: one phase of training, then what is shared travels."""

    takes_any_loop = True

"""FedAvg, client side: train what the server sent, send it back (McMahan et al., AISTATS 2017)."""

from fedhet.client import ClientSide
from fedhet.methods._averages import AveragingParameters


class FedAvg(ClientSide[AveragingParameters]):
    """The defaults of `ClientSide`: one phase of training, then what is shared travels."""

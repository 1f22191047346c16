"""FedAvg, client side: train what the server sent, send it back (McMahan et al., AISTATS 2017)."""

from fedhet.client import ClientHalf
from fedhet.methods._averages import AveragingParameters


class FedAvg(ClientHalf[AveragingParameters]):
    """The defaults of `ClientHalf`: one phase of training, then what is shared travels."""

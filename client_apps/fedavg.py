"""FedAvg, client half: train what the server sent, send it back (McMahan et al., AISTATS 2017)."""

from fedhet.client import ClientHalf


class FedAvg(ClientHalf):
    """The defaults of `ClientHalf`: one phase, the whole model travels, none is kept."""

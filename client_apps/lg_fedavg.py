"""LG-FedAvg, client side: the body is the client's own, the head is shared (Liang et al., 2020)."""

from fedhet.client import ClientSide
from fedhet.options import Parameters


class LGFedAvg(ClientSide[Parameters]):
    """One phase trains body and head together; the head travels."""

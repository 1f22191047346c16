"""The client's side of a run: the contract of a client side, and the ClientApp that serves every method."""

from fedhet.client.client import Client
from fedhet.client.client_side import ClientSide
from fedhet.client.state import ClientStore, LostState

__all__ = ["Client", "ClientSide", "ClientStore", "LostState"]

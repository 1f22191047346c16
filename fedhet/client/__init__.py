"""The client of a run: `Client`, the base class `ClientSide` of every method's client side, and a client's files."""

from fedhet.client.client import Client, ClientSide
from fedhet.client.state import ClientStore
from fedhet.messages import LostState

__all__ = ["Client", "ClientSide", "ClientStore", "LostState"]

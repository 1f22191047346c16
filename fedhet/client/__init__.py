"""The client of a run: `Client`, the base class `ClientSide`, and names that client sides import."""

from fedhet.client.client import Client, ClientSide
from fedhet.client.state import ClientStore
from fedhet.messages import Arrays, LostState, Payload
from fedhet.training import Loss, Phase, Step, Term

__all__ = ["Arrays", "Client", "ClientSide", "ClientStore", "Loss", "LostState", "Payload", "Phase", "Step", "Term"]

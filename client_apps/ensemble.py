"""Ensemble, client side: train a network of one's own and send it."""

from fedhet.client import ClientSide
from fedhet.options import Parameters


class Ensemble(ClientSide[Parameters]):
    """One phase; the whole network goes up, nothing comes down."""

"""Ensemble, client half: train a network of one's own and send it."""

from fedhet.client import ClientHalf


class Ensemble(ClientHalf):
    """One phase; the whole network goes up, nothing comes down."""

    personal = True

"""The client side."""

from fedhet.client import ClientSide

from . import SlowParameters


class Slow(ClientSide[SlowParameters]):
    """Trains as all do."""

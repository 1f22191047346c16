"""The client side."""

from fedhet.client import ClientSide

from . import SlowOptions


class Slow(ClientSide[SlowOptions]):
    """Trains as all do."""

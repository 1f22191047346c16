"""Local training, client half: a model of its own, on its own data."""

from fedhet.client import ClientHalf
from fedhet.exchange import Exchange


class Local(ClientHalf):
    """One phase; nothing travels."""

    personal = True

    def exchange(self) -> Exchange:
        """Nothing."""
        return Exchange("nothing")

"""Controls of DepthFL and InclusiveFL: only clients with the whole network are averaged.

They take the methods' keys and are named on the command line by file and name:

    fedhet compare depthfl inclusivefl large=run_configs/depthfl/controls.py:large_only --config depthfl/digits_plain
"""

from collections.abc import Mapping

from fedhet.messages import Reply
from fedhet.strategies.depthfl import DepthFL
from fedhet.strategies.inclusivefl import InclusiveFL


class ExitsLargeOnly(DepthFL):
    """Averages the whole networks, with all exits; the other clients receive and are scored as in DepthFL."""

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average the replies of clients that have all blocks; without one the global model is as before."""
        whole = {client: reply for client, reply in replies.items() if not self.parts(client)}
        return super().aggregate_fit(round, whole) if whole else {}


class LargeOnly(InclusiveFL):
    """Averages the whole networks, which have one head: FedAvg among the clients that have all blocks."""

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average the replies of clients that have all blocks; without one the global model is as before."""
        whole = {client: reply for client, reply in replies.items() if not self.parts(client)}
        return super().aggregate_fit(round, whole) if whole else {}


exits_large_only = DepthFL.method.variant("depthfl-large-only", server=ExitsLargeOnly)
large_only = InclusiveFL.method.variant("inclusivefl-large-only", server=LargeOnly)

"""Control of HeteroFL: only clients with the whole network are averaged.

It takes HeteroFL's keys and is named on the command line by file and name:

    fedhet compare heterofl large=run_configs/heterofl/controls.py:large_only --config run_configs/heterofl/digits.toml
"""

from collections.abc import Mapping

from fedhet.messages import Reply
from fedhet.strategies.heterofl import HeteroFL


class LargeOnly(HeteroFL):
    """Averages the whole networks; the other clients receive and are scored as in HeteroFL."""

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average the replies of clients that have all units; without one the global model is as before."""
        whole = {client: reply for client, reply in replies.items() if not self.parts(client)}
        return super().aggregate_fit(round, whole) if whole else {}


large_only = HeteroFL.method.variant("heterofl-large-only", server=LargeOnly)

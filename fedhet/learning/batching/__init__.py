"""Client batching: several clients train side by side, and networks that are built alike are run as one batch.

Each client's work is a plain function in a greenlet, which waits at every forward and backward pass (`passes`) until
the loop (`clients`) has run it, with other clients' if possible. Nothing above this folder knows of it.
"""

from fedhet.learning.batching.clients import ClientBatching
from fedhet.learning.batching.passes import Backward, Forward, outcome

__all__ = ["Backward", "ClientBatching", "Forward", "outcome"]

"""Client batching: several clients train side by side, and networks that are built alike are run as one batch.

A client's work is a plain function. Each runs in a greenlet of its own, one at a time, and waits at every forward and
backward pass (`passes`) until the loop that batches clients (`clients`) has run it, with those of other clients where
that is possible. Nothing above this folder knows whether clients are batched.
"""

from fedhet.learning.batching.clients import ClientBatching
from fedhet.learning.batching.passes import Backward, Forward, outcome

__all__ = ["Backward", "ClientBatching", "Forward", "outcome"]

"""Methods whose clients train a small network, of one architecture for all, and send only that."""

from dataclasses import dataclass

from fedhet.server import Options, Traits, option

SMALL_NETWORK = Traits(keeps="model", common_init=True, sends={"model": "weights"}, inside="")
"""Traits of methods whose clients keep their own networks and share a small one."""


@dataclass(frozen=True)
class SmallNetworkKeys(Options):
    """Key of methods whose clients share a small network."""

    uses = ("architectures",)  # The shared network is one of them.
    shared_model: str = option("", "shared network; empty: the first of architectures, mlp-20 for tabular data")

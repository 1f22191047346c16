"""Hypernetworks, which generate the weights of other networks.

The module `hypernetwork` is not imported here, because it imports PyTorch Geometric, which takes seconds.
"""

from fedhet.algorithms.hypernets.design import Catalogue, catalogue, start, std_of

__all__ = ["Catalogue", "catalogue", "start", "std_of"]

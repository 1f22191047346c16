"""Graph hypernetworks: weights for any architecture, from its graph.

`fedhet.algorithms.hypernets.hypernetwork` imports PyTorch Geometric, which takes seconds, and so is not imported here.
"""

from fedhet.algorithms.hypernets.design import Catalogue, Design, LayerType, Slot, catalogue, slots_of, start, std_of

__all__ = ["Catalogue", "Design", "LayerType", "Slot", "catalogue", "slots_of", "start", "std_of"]

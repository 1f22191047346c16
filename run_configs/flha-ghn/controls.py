"""Controls of FLHA-GHN: no messages along the data flow, or messages between other layers.

Each is a method that takes FLHA-GHN's keys, named on the command line by file and name:

    fedhet compare flha-ghn none=run_configs/flha-ghn/controls.py:none
"""

from dataclasses import replace

from fedhet.algorithms.graphs import LayerGraph
from fedhet.client_apps.flha_ghn import FLHAGHN
from fedhet.strategies.flha_ghn import FLHAGHN as FLHAGHNServer
from fedhet.utils.randomness import numpy_generator


class NoMessages(FLHAGHN):
    """Layers of one type get equal weights."""

    def messages(self) -> LayerGraph:
        """Return the graph without edges."""
        return replace(self.graph, edges=())


class Shuffled(FLHAGHN):
    """Messages pass between other layers."""

    def messages(self) -> LayerGraph:
        """Return the graph with permuted nodes, the same permutation for all clients with the architecture."""
        types = (node.type for node in self.graph)
        random = numpy_generator(self.client.config.seed, "shuffled edges", *types)
        order = random.permutation(len(self.graph.nodes))
        return replace(self.graph, edges=tuple((int(order[a]), int(order[b])) for a, b in self.graph.edges))


none = FLHAGHNServer.method.variant("flha-ghn-none", client=NoMessages)
shuffled = FLHAGHNServer.method.variant("flha-ghn-shuffled", client=Shuffled)

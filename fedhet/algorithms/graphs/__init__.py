"""Graphs of networks, their sets of interchangeable hidden units, and functions that reorder, add or remove units."""

from fedhet.algorithms.graphs.axes import VALUE as VALUE
from fedhet.algorithms.graphs.axes import Segment as Segment
from fedhet.algorithms.graphs.blocks import blocks as blocks
from fedhet.algorithms.graphs.graph import UnsupportedArchitecture as UnsupportedArchitecture
from fedhet.algorithms.graphs.graph import architecture_graph as architecture_graph
from fedhet.algorithms.graphs.layers import LayerGraph as LayerGraph
from fedhet.algorithms.graphs.layers import LayerNode as LayerNode
from fedhet.algorithms.graphs.layers import layer_graph as layer_graph
from fedhet.algorithms.graphs.permutations import PermutationGroup as PermutationGroup
from fedhet.algorithms.graphs.permutations import PermutationGroups as PermutationGroups
from fedhet.algorithms.graphs.permutations import Slot as Slot
from fedhet.algorithms.graphs.resize import Submodel as Submodel
from fedhet.algorithms.graphs.resize import resizable_groups as resizable_groups
from fedhet.algorithms.graphs.resize import resize as resize
from fedhet.algorithms.graphs.states import columns as columns
from fedhet.algorithms.graphs.states import cut_out as cut_out
from fedhet.algorithms.graphs.states import entries_of as entries_of
from fedhet.algorithms.graphs.states import expand as expand
from fedhet.algorithms.graphs.states import permute as permute
from fedhet.algorithms.graphs.states import rows as rows
from fedhet.algorithms.graphs.states import set_rows as set_rows
from fedhet.algorithms.graphs.states import tie as tie
from fedhet.algorithms.graphs.states import widths_of as widths_of

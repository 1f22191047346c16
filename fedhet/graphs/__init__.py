"""A model as a graph, its permutation groups, and its parameters along them."""

from .axes import Segment
from .blocks import blocks, stages
from .graph import ArchitectureGraph, Node, UnsupportedArchitecture
from .layers import LayerGraph, LayerNode, layer_graph
from .permutations import PermutationGroup, PermutationGroups, Slot, permutation_groups
from .reading import architecture_graph
from .resize import StackedLSTM, resize
from .states import columns, cut_out, expand, permute, rows, set_rows, tie, widths, widths_of

__all__ = [
    "ArchitectureGraph",
    "LayerGraph",
    "LayerNode",
    "Node",
    "PermutationGroup",
    "PermutationGroups",
    "Segment",
    "Slot",
    "StackedLSTM",
    "UnsupportedArchitecture",
    "architecture_graph",
    "blocks",
    "columns",
    "cut_out",
    "expand",
    "layer_graph",
    "permutation_groups",
    "permute",
    "resize",
    "rows",
    "set_rows",
    "stages",
    "tie",
    "widths",
    "widths_of",
]

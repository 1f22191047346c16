"""Graphs of networks, their sets of interchangeable hidden units, and functions that reorder, add or remove units."""

from fedhet.algorithms.graphs.axes import VALUE, Segment
from fedhet.algorithms.graphs.blocks import blocks
from fedhet.algorithms.graphs.graph import UnsupportedArchitecture, architecture_graph
from fedhet.algorithms.graphs.layers import LayerGraph, LayerNode, layer_graph
from fedhet.algorithms.graphs.permutations import PermutationGroup, PermutationGroups, Slot
from fedhet.algorithms.graphs.resize import Submodel, resizable_groups, resize
from fedhet.algorithms.graphs.states import (
    columns,
    cut_out,
    entries_of,
    expand,
    permute,
    rows,
    set_rows,
    tie,
    widths,
    widths_of,
)

__all__ = ["VALUE", "LayerGraph", "LayerNode", "PermutationGroup", "PermutationGroups", "Segment", "Slot", "Submodel"]
__all__ += ["UnsupportedArchitecture", "architecture_graph", "blocks", "columns", "cut_out", "entries_of", "expand"]
__all__ += ["layer_graph", "permute", "resizable_groups", "resize", "rows", "set_rows", "tie", "widths", "widths_of"]

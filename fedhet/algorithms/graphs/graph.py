"""The graph of a network's operators, with shapes and parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedhet.errors import ModelError
from fedhet.models.arrays import Kind


class UnsupportedArchitecture(ModelError):
    """Raised for a network that a method cannot use; the message names the operator or layer and a way out."""


@dataclass(frozen=True)
class Node:
    """An operator.

    Attributes:
        name: unique name in the graph.
        operator: ATen's name (``conv2d``, ``relu``, ``add``), with a namespace for other libraries
            (``torchvision.nms``); or ``input``, ``output``, ``constant``, ``getitem`` (one of several results),
            ``parameter`` (used in arithmetic), ``as_strided_scatter`` (a tensor after a write to a view of it).
        module: name of the module whose forward runs it; empty for the network itself.
        inputs: names of its input nodes, in the operator's order.
        shape: shape of its (first) result, with the batch axis; () if it is not a tensor.
        arguments: ATen's name of each input (``input``, ``query``).
        parameters: role (``weight``, ``running_mean``, ``weight_ih_l0``) -> ``state_dict`` name. Tied parameters have
            their first name.
        options: other arguments by ATen's names (``stride``, ``groups``, ``dim``).
    """

    name: str
    operator: str
    module: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    arguments: tuple[str, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict, hash=False)
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        where = f"of module {self.module!r}" if self.module else "in the model's forward"
        return f"{self.operator} {where}"


@dataclass(frozen=True)
class ArchitectureGraph:
    """The operators of a network.

    Attributes:
        model: name of the network's class.
        nodes: operators in order of execution, so inputs come first.
        shapes: ``state_dict`` name -> shape.
        tied: name -> first name, for parameters that share their storage.
        unused: parameters that the forward pass in evaluation mode does not use.
        kinds: ``state_dict`` name -> kind of the array.
    """

    model: str
    nodes: tuple[Node, ...]
    shapes: Mapping[str, tuple[int, ...]] = field(hash=False)
    tied: Mapping[str, str] = field(hash=False)
    unused: tuple[str, ...] = ()
    kinds: Mapping[str, Kind] = field(default_factory=dict, hash=False)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __getitem__(self, name: str) -> Node:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

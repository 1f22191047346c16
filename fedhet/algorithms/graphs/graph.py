"""A model as a graph of operators: what flows where, in which shapes and with which parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedhet.errors import ModelError
from fedhet.models.arrays import Kind


class UnsupportedArchitecture(ModelError):
    """A model that cannot be read, or not be used as a method needs it; the message names what and the way out."""


@dataclass(frozen=True)
class Node:
    """One operator of an architecture.

    Attributes:
        name: Unique in its graph.
        operator: ATen's name without overload and in-place mark (``conv2d``, ``relu``, ``add``); of other libraries'
            operators with their namespace (``torchvision.nms``); or ``input``, ``output``, ``constant``, ``getitem``
            (one of several results), ``parameter`` (one that is no layer's own: used in arithmetic, a computed weight),
            ``as_strided_scatter`` (a tensor after an operator in place wrote to a view of it).
        module: Qualified name of the module whose forward runs it (``""``: the model itself).
        inputs: Names of the nodes whose values it takes, in the operator's order.
        shape: Of its (first) value, batch axis included; () of what is no tensor.
        arguments: ATen's name of each input (``input``, ``query``; ``weight``, where a weight is computed).
        parameters: Role (ATen's name of the argument, and PyTorch's of recurrent weights: ``weight``, ``running_mean``,
            ``weight_ih_l0``, ...) -> ``state_dict`` name; of tied parameters always the first name.
        options: The operator's other arguments by ATen's names (``stride``, ``groups``, ``dim``, ...); in a list that
            has Nones beside inputs, an ellipsis stands for an input.
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
    """A model's computation as a directed acyclic graph of operators.

    Attributes:
        model: Name of the model's class.
        nodes: In the order of execution, so every node stands behind its inputs.
        shapes: ``state_dict`` name -> shape, of every parameter and buffer.
        tied: Name -> first name, of every parameter that shares its storage with one named before it.
        unused: Parameters that the forward pass in eval mode does not touch.
        kinds: ``state_dict`` name -> what the array is.
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

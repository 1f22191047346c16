"""The graph of a network's operators, with shapes and parameters."""

import operator
import re
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from fedhet.errors import ModelError
from fedhet.models.copies import Kind, in_evaluation_mode, kinds_of, tied_names
from fedhet.utils.inputs import Inputs, parts_of
from fedhet.utils.machine import out_of_memory


class UnsupportedArchitecture(ModelError):
    """Raised for a network that a method cannot use; the message names the operator or layer and what to change."""


@dataclass(frozen=True)
class Node:
    """An operator in the graph of a network.

    Attributes:
        name: name of the node, which is unique in the graph.
        operator: ATen's name (``conv2d``, ``add``), with a namespace for other libraries (``torchvision.nms``); or
            ``input``, ``output``, ``constant``, ``getitem`` (one of several results), ``parameter`` (used in
            arithmetic), ``as_strided_scatter`` (a tensor after a write to a view of it).
        module: name of the module whose forward runs the operator; empty for the network itself.
        inputs, arguments: names of the input nodes, and ATen's names of these inputs (``input``, ``query``).
        shape: shape of the (first) result, with the batch axis; () if it is not a tensor.
        parameters: ``state_dict`` name (the first, if tied) of each parameter, by role (``weight``, ``weight_ih_l0``).
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
    """The operators (`nodes`) of a network of class `model` in order of execution, and the arrays of its state dict.

    `shapes` and `kinds` (trained, frozen, statistic or buffer; see `kinds_of`) describe arrays by name. `tied` maps the
    other names of a shared parameter to its first name. `unused` names parameters that evaluation mode does not use,
    and `called` the modules that are called, unlike lists of modules.
    """

    model: str
    nodes: tuple[Node, ...]
    shapes: Mapping[str, tuple[int, ...]] = field(hash=False)
    tied: Mapping[str, str] = field(hash=False)
    unused: tuple[str, ...] = ()
    kinds: Mapping[str, Kind] = field(default_factory=dict, hash=False)
    called: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __getitem__(self, name: str) -> Node:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}


_ROLE = re.compile(r"weight|bias|^running_|^[wb]_[ih]h$")
# ATen's names of arguments that are parameters; recurrent layers take a list of them, "params".

_SLICE = re.compile(r"^(.*?)\.slice\((.*?)\)\.(\d+)")

_cache: "WeakKeyDictionary[nn.Module, dict[Hashable, ArchitectureGraph]]" = WeakKeyDictionary()


def architecture_graph(model: nn.Module, example: Tensor) -> ArchitectureGraph:
    """Return the graph of a network's operators, cached for the module, its shapes and the shape of the example.

    `example` is a batch (N, ...) of inputs. Raises UnsupportedArchitecture if ``torch.export`` cannot trace the model.
    """
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    parts = ((name, tuple(part.shape), part.dtype) for name, part in parts_of(example).items())
    key = (*parts, tuple(shapes.items()))
    graphs = _cache.setdefault(model, {})
    if key not in graphs:
        graphs[key] = _Reader(model, shapes).read(_export(model, example))
    return graphs[key]


def _export(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    # A batch of one example could be confused with an axis of one unit.
    example = torch.cat([example, example]) if example.shape[0] == 1 else example
    try:
        with in_evaluation_mode(model), warnings.catch_warnings(), ExitStack() as after:
            # Fused attention would hide the operators of PyTorch's transformer layers.
            after.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
            # nn.LSTM reassigns its list of weights; nothing of it stays.
            warnings.filterwarnings("ignore", "The tensor attributes? .*assigned during export")
            return torch.export.export(model, *_passed(model, example), strict=False)
    except Exception as error:  # torch.export raises whatever the model's own forward or the tracer raises
        if out_of_memory(error):
            raise
        raise UnsupportedArchitecture(
            f"torch.export cannot trace {type(model).__name__} on an input of shape {tuple(example.shape)}: {error}\n"
            "A model must take tensors and must not branch on their values: "
            "change its forward, or choose a method that does not analyse the network."
        ) from error


def _passed(model: nn.Module, example: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    try:
        signature(model.forward).bind(example)
    except TypeError:
        return example.arguments if isinstance(example, Inputs) else ((example,), {})
    return (example,), {}


class _Reader:
    """Converter of a program from `torch.export` to an `ArchitectureGraph`."""

    def __init__(self, model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> None:
        self.model, self.shapes, self.tied = model, shapes, tied_names(model)
        self.nodes: list[Node] = []
        self.called: set[str] = set()
        self.values: dict[fx.Node, str] = {}  # value -> the node that holds it now
        self.states: dict[fx.Node, str] = {}  # placeholder -> state_dict name
        self.originals: dict[fx.Node, fx.Node] = {}  # result of an in-place operator -> the value that it changed

    def read(self, program: torch.export.ExportedProgram) -> ArchitectureGraph:
        signature = program.graph_signature
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        for node in program.graph.nodes:
            if node.op == "placeholder" and (name := names.get(node.name)) in self.shapes:
                self.states[node] = self.tied.get(name, name)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self._add(node, "output", [("", each) for each in node.all_input_nodes])
            else:
                self._add(node, "input" if node.name in signature.user_inputs else "constant")
        needed, nodes = set[str](), list[Node]()
        for each in reversed(self.nodes):
            if each.operator in ("input", "output") or each.name in needed:
                needed.update(each.inputs)
                nodes.append(each)
        used = {name for each in nodes for name in each.parameters.values()}
        unused = [name for name, _ in self.model.named_parameters() if self.tied.get(name, name) not in used]
        kinds = kinds_of(self.model)
        title = type(self.model).__name__
        called = frozenset(self.called)
        return ArchitectureGraph(title, tuple(reversed(nodes)), self.shapes, self.tied, tuple(unused), kinds, called)

    def _call(self, node: fx.Node) -> None:
        schema = _schema(node)
        alias = schema.arguments[0].alias_info if schema and node.args else None
        writes = alias is not None and alias.is_write
        if schema and not schema.returns and not writes:
            return  # a check that export adds to the graph
        name = schema.name.removeprefix("aten::").replace("::", ".") if schema else getattr(node.target, "__name__", "")
        inputs = []
        parameters = {}
        options = {}
        for role, value in _arguments(node):
            nodes: list[fx.Node] = []
            fx.node.map_arg(value, nodes.append)
            for each in nodes:
                if each in self.states and _ROLE.search(role) and role not in parameters:
                    parameters[role] = self.states[each]
                else:
                    inputs.append((role, each))
            if not nodes:
                options[role] = value
        if writes:
            self.originals[node] = self._original(node.args[0])
        self._add(node, name.removesuffix("_") if writes else name, inputs, parameters, options)
        if writes:
            self._write_through(node)

    def _write_through(self, node: fx.Node) -> None:
        # The result of a write to a view changes all tensors that share its memory.
        value = self._original(node)
        while (viewed := _viewed(value)) is not None:
            written = self.values[value]
            value = self._original(viewed)
            name = f"{node.name}_in_{value.name}"
            inputs = (self._value(value), written)
            self.nodes.append(Node(name, "as_strided_scatter", self._module(node), inputs, _shape(value)))
            self.values[value] = name

    def _original(self, value: Any) -> fx.Node:
        return self.originals.get(value, value)

    def _add(
        self,
        node: fx.Node,
        operator: str,
        inputs: Sequence[tuple[str, fx.Node]] = (),
        parameters: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        names = tuple(name for name, _ in inputs)
        values = tuple(self._value(value) for _, value in inputs)
        self.nodes.append(
            Node(node.name, operator, self._module(node), values, _shape(node), names, parameters or {}, options or {})
        )
        self.values[self._original(node)] = node.name

    def _module(self, node: fx.Node) -> str:
        """Return the name of the module that runs an operator, and note the modules that are called around it."""
        names = [self._named(str(name)) for name, _ in (node.meta.get("nn_module_stack") or {}).values()]
        self.called.update(names)
        return names[-1] if names else ""

    def _named(self, name: str) -> str:
        # A module in a part of a list, as in self.layers[1:], is called layers.slice(1, None, None).0 in the program.
        while match := _SLICE.search(name):
            bounds = [None if bound == "None" else int(bound) for bound in match[2].split(", ")]
            places = range(len(cast(nn.ModuleList, self.model.get_submodule(match[1]))))[slice(*bounds)]
            name = f"{match[1]}.{places[int(match[3])]}{name[match.end() :]}"
        return name

    def _value(self, value: fx.Node) -> str:
        value = self._original(value)
        if value not in self.values:
            name = self.states[value]
            self.nodes.append(Node(value.name, "parameter", "", (), self.shapes[name], (), {"value": name}))
            self.values[value] = value.name
        return self.values[value]


def _schema(node: fx.Node) -> Any:
    return getattr(node.target, "_schema", None)


def _viewed(node: fx.Node) -> fx.Node | None:
    maker: Any = node.args[0] if node.target is operator.getitem else node
    schema = _schema(maker)
    return maker.args[0] if schema and schema.returns and schema.returns[0].alias_info is not None else None


def _arguments(node: fx.Node) -> list[tuple[str, Any]]:
    if node.target is operator.getitem:
        return [("self", node.args[0]), ("index", node.args[1])]
    schema = _schema(node)
    if schema is None:
        return [*((str(place), value) for place, value in enumerate(node.args)), *node.kwargs.items()]
    passed = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    arguments = {argument.name: passed.get(argument.name, argument.default_value) for argument in schema.arguments}
    weights = arguments.pop("params", ())
    return [*arguments.items(), *zip(_recurrent_roles(arguments, len(weights)), weights, strict=True)]


def _recurrent_roles(arguments: Mapping[str, Any], count: int) -> list[str]:
    if not count:
        return []
    directions = ["", "_reverse"] if arguments["bidirectional"] else [""]
    places = [f"l{layer}{direction}" for layer in range(arguments["num_layers"]) for direction in directions]
    kinds = ["weight_ih", "weight_hh"] + ["bias_ih", "bias_hh"] * bool(arguments["has_biases"])
    if count > len(places) * len(kinds):
        kinds.append("weight_hr")  # projections
    return [f"{kind}_{place}" for place in places for kind in kinds]


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    value = value[0] if isinstance(value, (tuple, list)) and value else value
    return tuple(int(size) for size in value.shape) if isinstance(value, Tensor) else ()

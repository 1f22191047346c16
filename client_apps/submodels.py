"""Client sides of HeteroFL, FjORD, DepthFL and InclusiveFL: clients train a part of the network.

HeteroFL (Diao et al., ICLR 2021) scales the outputs of hidden layers (see `Scaled`), and sets the network's outputs for
classes without an example on the client to 0 in the loss.

FjORD (Horvath et al., NeurIPS 2021, algorithm 1): each step draws a width p from the configured widths up to the
client's own width p_max. f_p is the network with the first ceil(p K) of the K units of each hidden layer.

    loss = CE(f_p(x), y),    or with self-distillation    CE(f_pmax(x), y) + KL(f_pmax(x) || f_p(x))

DepthFL (Kim et al., ICLR 2023): a client has the first blocks of a network, with an exit (classifier) each, which learn
from the labels and from each other:

    L = sum_i CE(p_i, y) + w(t) / (d - 1) sum_i sum_{j != i} KL(p_j || p_i)

The sums are over the client's d exits with predictions p_i; the target p_j of each KL is a constant. In round t, w(t) =
exp(-5 (1 - min(t - 1, T) / T)^2), T = `ramp-up`. InclusiveFL (Liu et al., KDD 2022) trains only the last exit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import permutations
from typing import ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedhet.algorithms.graphs import PermutationGroups, Submodel, cut_out, entries_of, resize
from fedhet.algorithms.graphs.blocks import EXITS, Exits, groups_by_depth
from fedhet.client import ClientSide
from fedhet.errors import DataError
from fedhet.messages import Payload
from fedhet.methods.included import submodels as declared
from fedhet.methods.options import Config
from fedhet.models.copies import multiplies, tied_names
from fedhet.models.representation import Output
from fedhet.training import Loss, Phase, Step, Term


class Scaled(Submodel):
    """A submodel with a fraction r of the units of each hidden layer; these layers' outputs are divided by r.

    If the network has more than 8 linear and convolutional layers, but no normalisation, they are divided by sqrt(r).
    """

    def cut(self, model: nn.Module) -> nn.Module:
        part = super().cut(model)
        slots = [slot for group in self.groups for slot in group.rows + group.completes]
        names = {slot.parameter.rpartition(".")[0]: None for slot in slots if self.width < 1}
        # Divided by r, outputs would grow with each layer; r^.5 keeps their variance.
        divisor = self.width**0.5 if multiplies(model) else self.width
        for layer in map(part.get_submodule, names):
            if isinstance(layer, nn.Linear | _ConvNd | nn.Embedding):
                layer.register_forward_hook(lambda module, inputs, outputs: outputs / divisor)
        return part


class HeteroFL(ClientSide[declared.SizedOptions]):
    """Client side of HeteroFL: trains a part of the network; the loss sets outputs for missing classes to 0."""

    parts = Scaled

    @cached_property
    def absent(self) -> Tensor | None:
        """Mask (classes,) of classes without training examples; None if all have some, or the task has no classes."""
        labels = self.client.data.train.labels
        if self.client.task.outputs.meaning != "classes":
            return None
        absent = torch.ones(self.client.outputs, dtype=torch.bool, device=labels.device)
        absent[labels[labels >= 0].long().unique()] = False  # negative labels are ignored
        return absent if bool(absent.any()) and self._by_class(len(absent)) else None

    def _by_class(self, classes: int) -> list[str]:
        tied = tied_names(self.client.model)
        names = [name for name in self.shared_names() if name.startswith(f"{self.client.head}.") and name not in tied]
        return [name for name in names if self.client.tensors[name].shape[:1] == (classes,)]

    def phases(self, payload: Payload) -> Sequence[Phase]:
        phases = super().phases(payload)
        if self.absent is None:
            return phases
        masked = Term(masked_loss, absent=self.absent)
        return [replace(phase, task_weight=0.0, terms=(masked, *phase.terms)) for phase in phases]

    def end(self, payload: Payload) -> Payload:
        reply = super().end(payload)
        if self.absent is not None:
            rows = torch.nonzero(~self.absent).flatten().cpu().numpy()
            reply.arrays["rows"] = dict.fromkeys(self._by_class(len(self.absent)), rows)
        return reply


def masked_loss(step: Step, absent: Tensor) -> Tensor:
    """Return the task's loss with the outputs of the classes in the mask `absent` (classes,) set to 0."""
    if step.task.outputs.places == "pixels":  # whose classes are the first axis of an example
        absent = absent.reshape(-1, *(1 for _ in step.outputs.shape[2:]))
    return step.loss(step.outputs.masked_fill(absent, 0))


class FjORD(ClientSide[declared.FjORDOptions]):
    """Client side of FjORD: trains the client's part of the network in randomly drawn widths."""

    parts = Submodel

    def handshake(self, payload: Payload) -> Payload:
        task = self.client.task
        if self.options.distil and task.outputs.meaning == "numbers":
            raise DataError(
                f"client {self.client.name}: fjord.distil needs class scores, but the outputs of a {task.name} are "
                "numbers: set fjord.distil = false"
            )
        return super().handshake(payload)

    def phases(self, payload: Payload) -> Sequence[Phase]:
        client, size, distil = self.client, self.client.part, self.options.distil
        assert size is not None
        widths = sorted({*(each for each in self.options.all_widths if each < size.width), size.width})
        cuts = [Cut(client.model, size, Submodel(width, size.groups)) for width in widths[:-1]]
        ordered = Ordered(client.model, cuts, client.generator("widths"), keeps_widest=distil)
        terms = (Term(learnt, ordered=ordered),) if distil else ()
        return [Phase(client.request.epochs, client.optimisation(), module=ordered, terms=terms)]


class Ordered(nn.Module):
    """A network that passes each batch through `network`, or a narrower network in `cuts`, drawn by `generator`.

    The networks in `cuts` use the first units of each hidden layer of `network`. The drawn network's outputs are kept
    in the attribute `narrow`, and returned. If `keeps_widest`, those of `network` are always returned instead.
    """

    narrow: Tensor

    def __init__(
        self, network: nn.Module, cuts: Sequence["Cut"], generator: torch.Generator, *, keeps_widest: bool
    ) -> None:
        super().__init__()
        self.network, self._cuts, self._generator, self._keeps_widest = network, cuts, generator, keeps_widest

    def forward(self, inputs: Tensor) -> Tensor:
        drawn = int(torch.randint(len(self._cuts) + 1, (), generator=self._generator))
        if drawn == len(self._cuts):
            self.narrow: Tensor = self.network(inputs)
            return self.narrow
        self.narrow = self._cuts[drawn](inputs, dict(self.network.named_parameters()))
        return self.network(inputs) if self._keeps_widest else self.narrow


def learnt(step: Step, ordered: Ordered) -> Tensor:
    """Return the mean KL(f || g) of a step's outputs f at full width and g in the width that `ordered` drew."""
    return step.divergence(ordered.narrow, step.outputs)


class Cut:
    """A narrower network, made of the first units of each hidden layer of `network`, which is a client's network.

    Both are submodels of the server's network: `size` describes `network`, and `narrow` the narrower network.
    """

    def __init__(self, network: nn.Module, size: Submodel, narrow: Submodel) -> None:
        groups = size.groups.with_widths([len(units) for units in size.units.values()])
        self._entries = {
            name: [(axis, torch.from_numpy(at)) for axis, at in enumerate(axes) if at is not None]
            for name, axes in entries_of(groups, narrow.units).items()
        }
        self._skeleton = resize(network, cut_out(network.state_dict(), groups, narrow.units)).train()

    def __call__(self, inputs: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return outputs for inputs (n, ...), computed from `parameters`, the parameters of `network` by name."""
        narrow = {}
        for name, tensor in parameters.items():
            for axis, at in self._entries.get(name, ()):
                tensor = tensor.index_select(axis, at.to(tensor.device))
            narrow[name] = tensor
        return torch.func.functional_call(self._skeleton, narrow, (inputs,))


D = TypeVar("D", bound=declared.DepthOptions)


class FirstBlocks(Submodel):
    """A client's part of a network: its first blocks, with an exit after each block."""

    @classmethod
    def groups_of(cls, model: nn.Module, inputs: Tensor) -> PermutationGroups:
        return groups_by_depth(cast(Exits, model), inputs)

    def cut(self, model: nn.Module) -> nn.Module:
        cast(Exits, model).add_exits(self.groups)
        part = cast(Exits, super().cut(model))
        part.depth = len(self.units[0])
        return part


class ByDepth(ClientSide[D]):
    """Base class of DepthFL's and InclusiveFL's client sides; `kind` is the class of the network with exits."""

    parts = FirstBlocks
    kind: ClassVar[type[Exits]] = Exits

    @classmethod
    def adapt(cls, model: nn.Module, config: Config) -> nn.Module:
        keys = config.options
        return cls.kind(model, count=keys.largest, names=keys.blocks)

    @classmethod
    def head_of(cls, config: Config) -> str:
        return f"{EXITS}.0" if config.options.largest > 1 else config.head


class DepthFL(ByDepth[declared.DepthFLOptions]):
    """Client side of DepthFL: trains all exits (classifiers after blocks) of the client's part of the network."""

    def handshake(self, payload: Payload) -> Payload:
        self.client.check_scores("which its exits exchange")
        return super().handshake(payload)

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        model, keys = cast(Exits, self.client.model), self.options
        others = {name: Output(model, name) for name in (f"{EXITS}.{number}" for number in range(model.depth - 1))}
        left = 1 - min(self.client.request.round - 1, keys.ramp_up) / keys.ramp_up if keys.ramp_up else 0.0
        return (Term(exits, captures=others, weight=math.exp(-5 * left**2)),) if others else ()


def exits(step: Step, weight: float) -> Tensor:
    """Return the sum of the task's losses of all exits but the last, plus `weight` times a distillation loss.

    The latter is the sum of the KL divergences between each two of the d exits, in both directions, divided by d - 1.
    """
    others = [outputs.to(step.outputs.dtype) for outputs in step.captured.values()]
    loss = torch.stack([step.loss(outputs) for outputs in others]).sum()
    learnt = [step.divergence(one, other) for one, other in permutations([*others, step.outputs], 2)]
    return loss + weight / len(others) * torch.stack(learnt).sum()


class LastExit(Exits):
    """A network with exits (classifiers after blocks) that returns the outputs of the last exit, also in evaluation."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.depth < self.count:
            with Output(self, f"{EXITS}.{self.depth - 1}").capture() as last:
                super().forward(inputs)
            return last()
        self.network.training = self.training
        return self.network(inputs)


class InclusiveFL(ByDepth[declared.InclusiveFLOptions]):
    """Client side of InclusiveFL: trains the client's blocks and their last exit (the head if it has all blocks)."""

    kind = LastExit

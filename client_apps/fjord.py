"""FjORD, client side: each training step draws a width of the network (Horvath et al., NeurIPS 2021, algorithm 1).

The width p is drawn from the configured widths up to the client's own width p_max. f_p is the network with the first
ceil(p K) of the K units of each hidden layer.

    loss = CE(f_p(x), y),    or with self-distillation    CE(f_pmax(x), y) + KL(f_pmax(x) || f_p(x))

This is the paper's loss with temperature and alpha equal to 1.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedhet.algorithms.graphs import cut_out, entries_of, resize
from fedhet.client import ClientSide
from fedhet.client.submodel import Submodel
from fedhet.errors import DataError
from fedhet.messages import Payload
from fedhet.methods.included.submodels import FjORDOptions
from fedhet.training import Phase, Step, Term


class FjORD(ClientSide[FjORDOptions]):
    """Trains the client's network in randomly drawn widths."""

    parts = Submodel

    def handshake(self, payload: Payload) -> Payload:
        """Raise a DataError if self-distillation is on and the outputs are not class scores."""
        task = self.client.task
        if self.options.distil and task.outputs.meaning == "numbers":
            raise DataError(
                f"client {self.client.name}: fjord.distil = true needs class scores, but the outputs of a {task.name} "
                "are numbers: set fjord.distil = false"
            )
        return super().handshake(payload)

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return one phase of ordered dropout, which draws a width in each step."""
        client, size, distil = self.client, self.client.part, self.options.distil
        assert size is not None
        widths = sorted({*(each for each in self.options.all_widths if each < size.width), size.width})
        ordered = Ordered(client.model, size, widths, client.generator("widths"), keeps_widest=distil)
        terms = (Term(learnt, ordered=ordered),) if distil else ()
        return [Phase(client.request.epochs, client.optimisation(), module=ordered, terms=terms)]


class Ordered(nn.Module):
    """A network that computes each batch in a randomly drawn width and, with `keeps_widest`, also in its full width.

    Attributes:
        narrow: outputs of the last batch in the drawn width, part of the autograd graph.
    """

    narrow: Tensor

    def __init__(
        self,
        network: nn.Module,
        size: Submodel,
        widths: Sequence[float],
        generator: torch.Generator,
        *,
        keeps_widest: bool,
    ) -> None:
        super().__init__()
        self.network, self._generator, self._keeps_widest = network, generator, keeps_widest
        self._cuts = [Cut(network, size, Submodel(width, size.groups)) for width in widths[:-1]]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs in the drawn width or, with `keeps_widest`, in the full width."""
        drawn = int(torch.randint(len(self._cuts) + 1, (), generator=self._generator))
        if drawn == len(self._cuts):
            self.narrow: Tensor = self.network(inputs)
            return self.narrow
        self.narrow = self._cuts[drawn](inputs, dict(self.network.named_parameters()))
        return self.network(inputs) if self._keeps_widest else self.narrow


def learnt(step: Step, ordered: Ordered) -> Tensor:
    """Return the divergence of the outputs in the drawn width from the outputs in the full width."""
    return step.divergence(ordered.narrow, step.outputs)


class Cut:
    """A narrower network within another network: it consists of the first units of each hidden layer."""

    def __init__(self, network: nn.Module, size: Submodel, narrow: Submodel) -> None:
        groups = size.groups.with_widths([len(units) for units in size.units.values()])
        self._entries = {
            name: [(axis, torch.from_numpy(at)) for axis, at in enumerate(axes) if at is not None]
            for name, axes in entries_of(groups, narrow.units).items()
        }
        self._skeleton = resize(network, cut_out(network.state_dict(), groups, narrow.units)).train()

    def __call__(self, inputs: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the outputs for inputs (n, ...); gradients reach `parameters`, the wide network's parameters."""
        narrow = {}
        for name, tensor in parameters.items():
            for axis, at in self._entries.get(name, ()):
                tensor = tensor.index_select(axis, at.to(tensor.device))
            narrow[name] = tensor
        outputs: Tensor = torch.func.functional_call(self._skeleton, narrow, (inputs,))
        return outputs

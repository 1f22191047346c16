"""Client side of FjORD: trains the client's part of the network in randomly drawn widths."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedhet.algorithms.graphs import Submodel, cut_out, entries_of, resize
from fedhet.client import Client, ClientSide, Payload, Phase, Step, Term
from fedhet.errors import DataError, Refused
from fedhet.strategies.fjord import Keys


class FjORD(ClientSide[Keys]):
    parts = Submodel

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        if client.privacy:
            raise Refused(
                "this node trains with differential privacy (dp-noise), which needs the gradient of each example, but "
                "fjord draws a width for each batch: choose another method, such as fedavg"
            )

    def handshake(self, payload: Payload) -> Payload:
        task = self.client.task
        if self.options.distil and task.outputs.meaning == "numbers":
            raise DataError(
                f"client {self.client.name}: fjord.distil needs class scores, but the outputs of a {task.name} are "
                "numbers: set fjord.distil = false"
            )
        return super().handshake(payload)

    def phases(self, payload: Payload) -> Sequence[Phase]:
        client = self.client
        size = client.part
        distil = self.options.distil
        assert size is not None
        widths = sorted({*(width for width in self.options.all_widths if width < size.width), size.width})
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
        self.network = network
        self._cuts = cuts
        self._generator = generator
        self._keeps_widest = keeps_widest

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

"""A toy hypernetwork: clients share a module that writes the weights of their networks, not the weights.

For each shape of a parameter it has one linear map from a node's embedding (how many parameters of that shape came
before) to the parameter. The server makes its first weights and averages it, taking replies in one by one.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedhet.client import Client, ClientSide
from fedhet.learning import Phase
from fedhet.method import Method, Traits
from fedhet.options import Parameters
from fedhet.randomness import torch_generator
from fedhet.server import FederatedStrategy, RunningMean, State
from fedhet.wire import Arrays, Payload, Reply, Spec, to_arrays

method = Method(
    "toy-hypernetwork",
    traits=Traits(keeps="nothing", scored="received"),
    server="toy_hypernetwork:Server",
    client="toy_hypernetwork:Client",
)
WIDTH = 3


class Server(FederatedStrategy[Parameters, State]):
    """Makes the first weights from the seed, and averages uniformly."""

    method = method
    takes_in = True

    def first_arrays(self, missing: Spec) -> Arrays:
        made = {}
        for key, (shape, _) in missing.items():
            stream = torch_generator(self.config.seed, "hypernetwork", key)
            kind = key.removeprefix("maps.").partition(".")[0]
            fan_in = int(torch.tensor([int(size) for size in kind.split("x")[1:]]).prod())
            scale = fan_in**-0.5 if key.endswith("bias") and "x" in kind else 0.01
            made[key] = (2 * torch.rand(shape, generator=stream) - 1) * scale
        return to_arrays(made)

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        self.mean = RunningMean()
        return super().configure_fit(round, clients)

    def take_in(self, round: int, reply: Reply) -> None:
        self.mean.add(reply.arrays.pop("model"), 1.0, self.federation.specs[reply.client])

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        self.state.model = self.state.model | self.mean.mean()
        return {}


class Hypernetwork(nn.Module):
    """Writes the weights of one network, and runs it with them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = (network,)  # not a submodule: its own parameters are not trained
        self.nodes: dict[str, tuple[str, int]] = {}
        shapes: dict[str, int] = {}
        for name, parameter in network.named_parameters():
            kind = "x".join(map(str, parameter.shape))
            self.nodes[name] = kind, shapes.get(kind, 0)
            shapes[kind] = shapes.get(kind, 0) + 1
        sizes = {self.nodes[name][0]: parameter.numel() for name, parameter in network.named_parameters()}
        self.maps = nn.ModuleDict({kind: nn.Linear(WIDTH, size) for kind, size in sizes.items()})

    def write(self) -> dict[str, Tensor]:
        own = dict(self.network[0].named_parameters())
        embeddings = {place: torch.tensor([float(place == k) for k in range(WIDTH)]) for place in range(9)}
        return {
            name: self.maps[kind](embeddings[place]).view_as(own[name]) for name, (kind, place) in self.nodes.items()
        }

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self.network[0], self.write(), (inputs,))
        return outputs


class Client(ClientSide[Parameters]):
    """Trains the hypernetwork; a network that it wrote is refined for an epoch before it is evaluated."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.hypernetwork = Hypernetwork(client.model)

    def shared(self) -> dict[str, Tensor]:
        return self.hypernetwork.state_dict()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        return [Phase(self.client.request.epochs, self.client.optimisation(), module=self.hypernetwork)]

    def refine(self, when: str) -> Sequence[Phase]:
        with torch.no_grad():
            for name, written in self.hypernetwork.write().items():
                self.client.tensors[name].copy_(written)
        head = f"{self.client.head}."
        return [Phase(1, self.client.optimisation(), trains=lambda name: name.startswith(head))]

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor]:
        return self.client.model

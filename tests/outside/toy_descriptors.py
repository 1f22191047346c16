"""A toy descriptor method on a labelled public dataset: clients align their most important activations, image by image.

For each image of the public dataset and each of two modules a client sends the K activations with the largest
gradients of its loss; the server averages them by image and slot; clients train on their own examples, then on the
public dataset towards that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.client import ClientSide
from fedhet.data import Examples
from fedhet.learning import Phase, Step
from fedhet.method import Method, Traits
from fedhet.options import Parameters, option
from fedhet.representations import Output
from fedhet.server import FederatedStrategy, State
from fedhet.wire import Arrays, Payload, Reply, check, to_arrays, to_tensor

K = 8


@dataclass(frozen=True)
class Weights(Parameters):
    """The method's own key."""

    alpha: float = option(
        0.5, "weight of the task's loss on the public dataset, beside 1 - alpha of the distance", at_least=0
    )


method = Method(
    "toy-descriptors",
    traits=Traits(keeps="model", scored="trained", public="labelled", sends={"descriptors": "descriptors"}),
    Parameters=Weights,
    server="toy_descriptors:Server",
    client="toy_descriptors:Client",
    common={"lr-schedule": "one-cycle"},
)


@dataclass
class Descriptors(State):
    """The mean descriptors, `values` (n, 2 K)."""

    target: Arrays = field(default_factory=dict)


class Server(FederatedStrategy[Weights, Descriptors]):
    """Averages descriptors by image and slot."""

    method = method
    state_class = Descriptors

    def payload_for(self, client: str) -> Payload:
        return Payload({"target": self.state.target} if self.state.target else {})

    def check_reply(self, reply: Reply) -> None:
        expected = {"values": ((self.state.public_size, 2 * K), "float32")}
        check(reply.arrays.get("descriptors", {}), expected, "its descriptors")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        sent = [reply.arrays["descriptors"]["values"] for reply in replies.values()]
        self.state.target = {"values": np.mean(sent, axis=0, dtype=np.float32)}
        return {}


class Client(ClientSide[Weights]):
    """Which positions were the important ones is known to the client alone."""

    remembers = True

    def __init__(self, client) -> None:
        super().__init__(client)
        relus = [name for name, module in client.model.named_modules() if isinstance(module, nn.ReLU)]
        self.captures = {
            name: Output(client.model, module) for name, module in zip("ab", (relus[0], relus[-1]), strict=True)
        }

    def phases(self, payload: Payload) -> Sequence[Phase]:
        own = Phase(self.client.request.epochs, self.client.optimisation(0, 2))
        if "target" not in payload.arrays or "a" not in self.client.memory:
            return [own]
        target, indices = to_tensor(payload.arrays["target"]["values"]), self.client.memory

        def distance(step: Step) -> Tensor:
            found = [
                step.captured[name].flatten(1).gather(1, indices[name][step.rows].long()) for name in self.captures
            ]
            distances = 1 - F.cosine_similarity(torch.cat(found, 1), target[step.rows])
            return (1 - self.parameters.alpha) * distances.mean()

        public = self.client.public
        shared = Phase(
            0,
            self.client.optimisation(1, 2),
            steps=4,
            examples=Examples(public.inputs, public.labels),
            terms=(distance,),
            task_weight=self.parameters.alpha,
            captures=self.captures,
            continues=True,
        )
        return [own, shared]

    def end(self, payload: Payload) -> Payload:
        values = []
        for name, (activations, scores) in self._scored().items():
            best = scores.abs().topk(K, 1).indices
            self.client.memory[name] = best.int()
            values.append(activations.gather(1, best))
        return Payload({"descriptors": to_arrays({"values": torch.cat(values, 1)})})

    def _scored(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By module, each image's activations and the gradients of its loss there, (n, units)."""
        client, public = self.client, self.client.public
        client.model.eval()
        with self.captures["a"].capture() as a, self.captures["b"].capture() as b:
            outputs = client.model(client.transform(public.inputs))
        captured = {"a": a.features, "b": b.features}
        loss = F.cross_entropy(outputs, public.labels, reduction="sum")
        gradients = torch.autograd.grad(loss, list(captured.values()))
        return {
            name: (captured[name].detach().flatten(1), gradient.flatten(1))
            for name, gradient in zip(captured, gradients, strict=True)
        }

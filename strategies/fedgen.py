r"""FedGen, server side: a generator learns representations that the clients' heads agree on (Zhu et al., ICML 2021).

    L = CE(mean_i h_i(G(e, y)), y) + d exp(-mean_{j, k} |e_j - e_k|^2 |G_j - G_k|)      equation 4, and diversity

for noise e and classes y, drawn in proportion to the clients' examples. Heads h_i are linear, so the mean of their
scores equals the scores of the averaged head, which clients receive with the generator.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhet.data import Examples
from fedhet.errors import ModelError
from fedhet.messages import Arrays, Payload, Reply, cast
from fedhet.methods.included.prototypes import FedGenOptions, fedgen
from fedhet.models.generator import Generator, draw
from fedhet.server import ArraysBy, FederatedStrategy, State
from fedhet.training import Optimisation, Phase, Step
from fedhet.utils.randomness import torch_generator

from ._common import MOST_CLASSES, build_at_server, class_counts, train_at_server


@dataclass
class FedGenState(State):
    """The state of FedGen: `classes` has each client's class counts, `generator` the generator's float64 weights."""

    classes: ArraysBy = field(default_factory=dict)
    generator: Arrays = field(default_factory=dict)


class FedGen(FederatedStrategy[FedGenOptions, FedGenState]):
    """Averages the clients' heads like LG-FedAvg, and trains the generator against the averaged head."""

    method = fedgen
    state_class = FedGenState

    def admit(self, reply: Reply) -> None:
        shape, _ = reply.report.spec.get("head.weight", ((), ""))
        if len(shape) != 2 or max(shape) > MOST_CLASSES:
            raise ModelError(f"the client's head.weight has shape {shape}, but the generator needs (classes, width)")
        self.state.classes[reply.client] = {"counts": class_counts(reply, shape[0])}

    @property
    def counts(self) -> Tensor:
        """Number of training examples of each class over all clients, (classes,) int64."""
        return torch.stack([torch.from_numpy(each["counts"]) for each in self.state.classes.values()]).sum(0)

    def payload_for(self, client: str) -> Payload:
        """Return the averaged head and, once it is trained, the generator with the numbers of examples by class."""
        payload = super().payload_for(client)
        if self.state.generator:
            payload.arrays["generator"] = cast(self.state.generator, self.config.wire_dtype)
            payload.arrays["classes"] = {"counts": self.counts.numpy()}
        return payload

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        metrics, keys = super().aggregate_fit(round, replies), self.options
        head = {name: torch.from_numpy(self.state.model[f"head.{name}"]).double() for name in ("weight", "bias")}
        generator = build_at_server(lambda: Generator(*head["weight"].shape), self.config.seed).double()
        batch = max(self.config.batch_size, 2)  # which BatchNorm needs
        stream = torch_generator(self.config.seed, "noise", round)
        drawn = draw(self.counts, keys.server_steps * batch, stream, torch.float64)

        def loss(step: Step) -> Tensor:
            agreed = F.cross_entropy(F.linear(step.outputs, head["weight"], head["bias"]), step.labels)
            return agreed + keys.diversity * alike(step.inputs[:, :-1], step.outputs)

        steps = Optimisation("adam", keys.server_learning_rate, batch_size=batch)
        phase = Phase(1, steps, terms=(loss,), task_weight=0.0)
        examples, weights = Examples(drawn, drawn[:, -1].long()), self.state.generator
        self.state.generator, trained = train_at_server(generator, weights, phase, examples, self.config.seed, round)
        return metrics | trained


def alike(noise: Tensor, outputs: Tensor) -> Tensor:
    """Return the diversity loss of the authors' code for noise (n, e) and outputs (n, d), small if outputs differ."""
    apart = torch.cdist(noise, noise, compute_mode="donot_use_mm_for_euclid_dist").square() / noise.shape[1]
    return (-apart * torch.cdist(outputs, outputs, p=1) / outputs.shape[1]).mean().exp()

"""FedGen (Zhu et al., ICML 2021): a generator G learns representations on which the clients' heads h_i agree.

    server:    L(G) = CE(mean_i h_i(G(e, y)), y) + b exp(-mean_{j, k} |e_j - e_k|^2 |G_j - G_k|)         (equation 4)
    client i:  L(w) = CE(h(Phi(x)), y') + weight CE(h(G(e, y)), y)        for an example x of class y'   (equation 5)

Noise e and classes y are drawn in proportion to the clients' examples; b is the key `diversity`. The mean score of
linear heads is the score of the averaged head, which clients receive with the generator.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedhet.data import Examples
from fedhet.errors import ModelError
from fedhet.methods.sharing import HEAD
from fedhet.models.networks import Generator, draw
from fedhet.server import Arrays, ArraysBy, FederatedStrategy, Payload, Reply, State, Traits, method, option
from fedhet.server.claims import limited
from fedhet.training import Optimisation, Phase, Step
from fedhet.utils.randomness import torch_generator

from .families.at_server import build_at_server, train_at_server
from .families.by_class import MOST_CLASSES, WidthKeys, class_counts

MOST = 1000
"""The largest number of generated examples in a step; memory grows with its square, because all pairs are compared."""


@dataclass(frozen=True)
class Keys(WidthKeys):
    # The weight is the paper's; other defaults are from the authors' code for MNIST.
    weight: float = option(1.0, "weight of the clients' loss on generated representations", at_least=0)
    diversity: float = option(1.0, "weight of the generator's diversity loss", at_least=0)
    server_steps: int = option(
        50, f"number of steps per round, with batch-size (at most {MOST}) examples, of the generator", at_least=1
    )
    server_learning_rate: float = option(3e-4, "learning rate of the server's Adam", above=0)


@dataclass
class Generated(State):
    """The state of FedGen: `classes` has each client's class counts, `generator` the generator's float64 weights."""

    classes: ArraysBy = field(default_factory=dict)
    generator: Arrays = field(default_factory=dict)


@method(
    "fedgen",
    Traits(shares=HEAD, keeps="model", common_init=True, sends={"classes": "statistics"}, inside="head"),
    Keys,
    client="fedhet.client_apps.fedgen:FedGen",
    own={"fedgen.width": 32},
)
class FedGen(FederatedStrategy[Keys, Generated]):
    """FedGen: the average of the clients' heads, and a generator of representations trained on the mean head."""

    def admit(self, reply: Reply) -> None:
        shape, _ = reply.report.spec.get("head.weight", ((), ""))
        if len(shape) != 2 or max(shape) > MOST_CLASSES:
            raise ModelError(f"the client's head.weight has shape {shape}, but must be (classes, width): use nn.Linear")
        self.state.classes[reply.client] = {"counts": class_counts(reply, shape[0])}

    @property
    def counts(self) -> Tensor:
        claims = {client: float(arrays["counts"].sum()) for client, arrays in self.state.classes.items()}
        most = limited(self.config, claims)
        shares = {client: most[client] / claim for client, claim in claims.items()}
        counts = [np.rint(arrays["counts"] * shares[c]) for c, arrays in self.state.classes.items()]
        return torch.from_numpy(np.sum(counts, 0).astype(np.int64))

    def payload_for(self, client: str) -> Payload:
        payload = super().payload_for(client)
        if self.state.generator:
            _, dtype = self.federation.specs[client]["head.weight"]
            arrays = self.state.generator.items()
            payload.arrays["generator"] = {n: a.astype(dtype) if a.dtype.kind == "f" else a for n, a in arrays}
            payload.arrays["classes"] = {"counts": self.counts.numpy()}
        return payload

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        metrics = super().aggregate_fit(round, replies)
        keys = self.options
        head = {name: torch.from_numpy(self.state.model[f"head.{name}"]).double() for name in ("weight", "bias")}
        generator = build_at_server(lambda: Generator(*head["weight"].shape), self.config.seed).double()
        batch = min(max(self.config.batch_size, 2), MOST)  # BatchNorm needs two examples.
        stream = torch_generator(self.config.seed, "noise", round)
        drawn = draw(self.counts, keys.server_steps * batch, stream, torch.float64)

        def loss(step: Step) -> Tensor:
            agreed = F.cross_entropy(F.linear(step.outputs, head["weight"], head["bias"]), step.labels)
            return agreed + keys.diversity * alike(step.inputs[:, :-1], step.outputs)

        steps = Optimisation("adam", keys.server_learning_rate, batch_size=batch)
        phase = Phase(1, steps, terms=(loss,), task_weight=0.0)
        examples = Examples(drawn, drawn[:, -1].long())
        self.state.generator, trained = train_at_server(
            generator, self.state.generator, phase, examples, self.config.seed, round
        )
        return metrics | trained


def alike(noise: Tensor, outputs: Tensor) -> Tensor:
    """Return FedGen's diversity loss of the generator's outputs (n, d) for noise (n, e): small if outputs differ."""
    apart = torch.cdist(noise, noise, compute_mode="donot_use_mm_for_euclid_dist").square() / noise.shape[1]
    return (-apart * torch.cdist(outputs, outputs, p=1) / outputs.shape[1]).mean().exp()

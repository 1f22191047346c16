"""FedCon (Long et al., 2021): the server has labels, and clients train the encoder on examples without labels.

    client i:  L(w) = D(h(f_w(x)), f_v(x')) / 2 + D(h(f_w(x')), f_v(x)) / 2,   D(p, z) = -cos(p, z)
               v <- decay v + (1 - decay) w, after each step
    server:    w = mean of the clients' w_i by examples; then, on labelled examples (x, y),
               L(w) = CE(w(x), y) / 2 + CE(w(x'), y) / 2 + r(t) [KL(v(x') || w(x)) / 2 + KL(v(x) || w(x')) / 2]
               v <- tau v + (1 - tau) w, in each step

x and x' are two views of an example, f is the encoder, h a projection head that stays at the client, as does its second
network v; the server has one of its own. The labelled examples are the public dataset.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedhet.messages import to_arrays
from fedhet.server import Arrays, Payload, Reply, State, Traits, method, option
from fedhet.training import Optimisation, Phase, Step

from .families.contrast import NETWORK, ViewsAtServer, ViewsKeys

RAMP = 100
"""Number of rounds until the server's consistency loss has its full weight."""

LEAST, STEPS, STEPS_A_ROUND = 4e-4, 20_000, 1000
"""The server's 1 - tau falls from `LEAST` to 0 in `STEPS` steps, of which each round counts as `STEPS_A_ROUND`."""


@dataclass(frozen=True)
class Keys(ViewsKeys):
    public_at_server = True
    width: int = option(12288, "width of the projection head's hidden layer", at_least=1, at_most=2**16)
    decay: float = option(0.999, "decay of the average that is a client's second network", at_least=0, at_most=1)
    server_epochs: int = option(1, "number of epochs per round on the labelled examples", at_least=1)
    server_learning_rate: float = option(0.01, "learning rate of the server's SGD with momentum 0.5", above=0)


@dataclass
class SecondNetwork(State):
    """The state of FedCon: `second` has the parameters of the server's second network."""

    second: Arrays = field(default_factory=dict)


@method(
    "fedcon",
    Traits(networks="equal", shares=NETWORK, common_init=True, public="labelled"),
    Keys,
    client="fedhet.client_apps.fedcon:FedCon",
    own={"fedcon.width": 128},
)
class FedCon(ViewsAtServer[Keys, SecondNetwork]):
    """FedCon: the average of encoders that clients train without labels, which the server then trains on labels."""

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        if not self.state.second:
            self.learn(0)
        return super().configure_fit(round, clients)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        return super().aggregate_fit(round, replies) | self.learn(round)

    def learn(self, round: int) -> dict[str, float]:
        """Train the shared network on the labelled examples; return the metric `server_loss`."""
        weights = self.state.model
        second = {name: torch.from_numpy(array.copy()) for name, array in self.state.second.items()}

        def loss(step: Step) -> Tensor:
            if not second:
                shared = {name: array for name, array in step.parameters.items() if name in weights}
                second.update({name: array.detach().clone() for name, array in shared.items()})
            second.update({name: array.to(step.inputs.device) for name, array in second.items()})
            value = labelled_loss(step, step.by(second), ramp(round))
            follow(second, step.parameters, decay(round, step.number))
            return value

        steps = Optimisation("sgd", self.options.server_learning_rate, 0.5, batch_size=self.config.batch_size)
        phase = Phase(self.options.server_epochs, steps, terms=(loss,))
        arrays, metrics = self.train_on_views(weights, lambda _phi: phase, round)
        self.state.model = {name: arrays[name] for name in weights}
        self.state.second = to_arrays(second)
        return metrics


def labelled_loss(step: Step, others: Tensor, weight: float) -> Tensor:
    """Return the server's loss of a step: of labels, plus `weight` times the divergence from outputs `others` (2n, k).

    `others` are the second network's outputs for the same inputs; the other view's are the target of each view.
    """
    first, second = step.outputs.chunk(2)
    labelled = step.loss(first) / 2 + step.loss(second) / 2
    return labelled + weight * step.divergence(step.outputs, others.roll(len(first), 0))


def ramp(round: int) -> float:
    """Return r(t), the weight of the server's consistency loss after `round` rounds."""
    return math.exp(-5 * (1 - min(round, RAMP) / RAMP) ** 2)


def decay(round: int, step: int) -> float:
    """Return tau, the decay of the server's second network in a step (from 0) after `round` rounds."""
    done = min((round * STEPS_A_ROUND + step) / STEPS, 1.0)
    return 1 - LEAST * (math.cos(math.pi * done) + 1) / 2


def follow(targets: Mapping[str, Tensor], arrays: Mapping[str, Tensor], decay: float) -> None:
    """Move the `targets` towards the `arrays` of the same names, in place: decay * target + (1 - decay) * array."""
    with torch.no_grad():
        for name, target in targets.items():
            target.lerp_(arrays[name].detach(), 1 - decay)

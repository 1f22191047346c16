"""Example-level differential privacy (DP-SGD) of a client's training.

DP-SGD (Abadi et al., CCS 2016, algorithm 1, with Poisson sampling): each example's gradient is clipped, and noise is
added to the sum of the gradients. Sums and noise are computed in float64, and their total is rounded to a grid, because
the low bits of a floating-point number can disclose it in spite of noise (Mironov, CCS 2012).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedhet.data import Examples
from fedhet.errors import Refused
from fedhet.utils.inputs import for_each
from fedhet.utils.machine import out_of_memory
from fedhet.utils.randomness import SecretStream, derive_seed, seed_everything
from fedhet.utils.text import log

AT_ONCE = 64  # number of examples whose separate gradients are computed at once in differentially private training
GRID = 2.0**-20  # distance of the values that a noisy sum can have, as a multiple of the noise's standard deviation

Values = dict[str, Tensor]
"""Values (n, ...) of n examples by name."""

ExampleLoss = Callable[[Tensor, Tensor], Tensor]
"""A function of inputs (1, ...) and labels (1, ...) of one example that returns its scalar loss."""


def cost_of_sums(noise: float, count: int, size: int) -> tuple[float, float, int]:
    """Return noise multiplier, sampling rate and number of steps that `Privacy.class_sums` of `count` examples costs.

    With batches of `size`, they cost about as much as an epoch of training with the noise multiplier `noise`.
    """
    return noise * math.sqrt(max(count / size, 1.0)), 1.0, 1


class _Loss(nn.Module):
    """A loss as a module, so that `functional_call` replaces the parameters of all modules that it calls."""

    def __init__(self, model: nn.Module, loss: ExampleLoss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.loss(inputs[None], labels[None])


def one_by_one(read: Callable[[Tensor], tuple[Tensor, Tensor]], rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels that `read` returns for each of `rows` alone.

    A user's function that augments or collates examples could mix those of a batch, as mixup does. Each has its own
    random numbers, so that an example that draws more of them changes no other.
    """
    seed = torch.initial_seed()
    examples = []
    for number, row in enumerate(rows):
        seed_everything(derive_seed(seed, number))
        examples.append(read(row[None]))
    seed_everything(seed)
    inputs, labels = map(torch.cat, zip(*examples, strict=True))
    return inputs, labels


@dataclass
class Privacy:
    """The settings of a client's differentially private training.

    Attributes:
        noise: standard deviation of the noise that is added to the sum of gradients, as a multiple of `clip`.
        clip: largest Euclidean norm of the gradient of one example.
        spend: function of noise, sampling rate and number of steps that is called before these steps; returns `epsilon`
            after them, or raises an error if this exceeds the client's budget.
        stream: random stream that draws examples and noise.
        epsilon: the privacy budget spent so far.
    """

    noise: float
    clip: float
    spend: Callable[[float, float, int], float]
    stream: SecretStream = field(default_factory=SecretStream)
    epsilon: float = 0.0

    def rows(self, count: int, size: int, steps: int) -> Iterator[Tensor]:
        """Yield the batches of `steps` steps: indices below `count`, drawn by Poisson sampling.

        Each index is in a batch with probability `size` / `count`. The first step spends the privacy budget of all.
        """
        rate = min(size / count, 1.0)
        self.epsilon = self.spend(self.noise, rate, steps)
        for _ in range(steps):
            yield self.stream.sample(count, rate)

    def check(self, model: nn.Module, loss: ExampleLoss, inputs: Tensor, labels: Tensor) -> None:
        """Raise `Refused` if the gradients of single examples cannot be computed, tried with an example of zeros.

        Whether training fails must not depend on private examples, so the message can say why. `inputs` (1, ...) are
        transformed zeros, and `labels` (1, ...) have the shape and type of an example's; `model` and `loss` are those
        of `backward`.
        """
        try:
            self._gradients(model, loss)(inputs, torch.zeros_like(labels))
        except (RuntimeError, ValueError) as error:
            network = getattr(model, "_get_name", lambda: "network")()
            raise Refused(
                f"dp-noise needs the gradient of each example, and torch.func cannot compute it for this {network} "
                f"({error}): use another network or method, or leave dp-noise out"
            ) from error

    def backward(
        self,
        model: nn.Module,
        loss: ExampleLoss,
        batch: Callable[[Tensor], tuple[Tensor, Tensor]],
        rows: Tensor,
        size: int,
    ) -> None:
        """Set the private gradients of all parameters that require gradients.

        A gradient is the sum of the examples' clipped gradients and the noise, divided by `size`. An example whose
        gradient cannot be computed counts as zero.

        Args:
            model: the network, without layers that normalise over examples.
            loss: function from inputs and labels of one example to its scalar loss, by `model`.
            batch: function from indices of examples to their transformed inputs and labels.
            rows: indices of the examples in the step; there may be none.
            size: expected number of examples in a step.
        """
        live = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        total = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in live.items()}
        gradients_of = self._gradients(model, loss)
        for gradients in self._each(lambda some: gradients_of(*batch(some)), rows):
            doubles = {name: gradient.double() for name, gradient in gradients.items()}
            norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in doubles.values()]).norm(dim=0)
            scale = (self.clip / norms.clamp_min(self.clip)).nan_to_num()
            for name, gradient in doubles.items():
                total[name] += torch.tensordot(scale, gradient.nan_to_num(), 1)
        for name, parameter in live.items():
            parameter.grad = (self._noisy(total[name], self.noise * self.clip) / size).to(parameter.dtype)

    def class_sums(
        self, vectors: Callable[[Tensor], Tensor], examples: Examples, classes: int, size: int
    ) -> tuple[Tensor, Tensor]:
        """Return noisy sums (classes, d) of the examples' vectors by class, and noisy numbers (classes,) of examples.

        The function `vectors` maps raw inputs (n, ...) to vectors (n, d), which are clipped to `clip`. An example's
        vector and count, as a multiple of `clip`, have the norm sqrt(2) `clip`. `cost_of_sums` has the noise multiplier
        for batches of `size`.
        """
        width = vectors(for_each(examples.at(slice(0, 1))[0], torch.zeros_like)).shape[1]
        noise, rate, steps = cost_of_sums(self.noise, len(examples), size)
        self.epsilon = self.spend(noise, rate, steps)
        device = examples.labels.device
        total = torch.zeros(classes, width + 1, dtype=torch.float64, device=device)

        def of(rows: Tensor) -> Values:
            inputs, labels = examples.at(rows)
            return {"vectors": vectors(inputs).double(), "labels": labels}

        # One at a time: a network can mix the examples of a batch.
        for found in self._each(of, torch.arange(len(examples), device=device), at_once=1):
            values, labels = found["vectors"], found["labels"]
            scale = (self.clip / values.norm(dim=1).clamp_min(self.clip)).nan_to_num()
            parts = torch.cat([scale[:, None] * values.nan_to_num(), torch.full_like(scale, self.clip)[:, None]], 1)
            there = (labels >= 0) & (labels < classes)
            total.index_add_(0, labels[there], parts[there])
        total = self._noisy(total, math.sqrt(2) * noise * self.clip)
        return total[:, :-1], total[:, -1] / self.clip

    def _gradients(self, model: nn.Module, loss: ExampleLoss) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
        whole = _Loss(model, loss)
        live = {name: parameter.detach() for name, parameter in whole.named_parameters() if parameter.requires_grad}

        def of_one(parameters: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
            value: Tensor = functional_call(whole, parameters, (inputs, labels))
            return value

        of_each = vmap(grad(of_one), in_dims=(None, 0, 0), randomness="different")
        return lambda inputs, labels: {
            name.removeprefix("model."): gradient for name, gradient in of_each(live, inputs, labels).items()
        }

    def _each(self, compute: Callable[[Tensor], Values], rows: Tensor, at_once: int = AT_ONCE) -> Iterator[Values]:
        """Yield `compute` of `rows`, some at a time, without the rows for which it raises an exception.

        Whether a row fails changes no random numbers of other rows, such as dropout masks, and no later ones.
        """
        for some in rows.split(at_once) if len(rows) else ():
            seed = self.stream.seed()
            try:
                seed_everything(seed)
                yield compute(some)
            except Exception as error:  # of a user's code as well; a message that fails would disclose the example
                if out_of_memory(error):
                    raise
                yield from self._alone(compute, some, seed)
        seed_everything(self.stream.seed())

    def _alone(self, compute: Callable[[Tensor], Values], rows: Tensor, seed: int) -> Iterator[Values]:
        """Yield `compute` of each row, from a batch of copies of the row, without the rows for which it fails."""
        for place, row in enumerate(rows):
            try:
                seed_everything(seed)
                values = compute(row.expand(len(rows)))
            except Exception as error:
                if out_of_memory(error):
                    raise
                log.warning("an example is left out of private training: %s: %s", type(error).__name__, error)
            else:
                yield {name: value[place : place + 1] for name, value in values.items()}

    def _noisy(self, total: Tensor, deviation: float) -> Tensor:
        noisy = total + deviation * self.stream.normal(total.shape).to(total.device)
        grid = 2.0 ** math.ceil(math.log2(deviation * GRID)) if deviation else 0.0
        return (noisy / grid).round() * grid if grid else noisy

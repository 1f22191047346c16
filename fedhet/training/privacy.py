"""Example-level differential privacy (DP-SGD) of a client's training.

DP-SGD (Abadi et al., CCS 2016, algorithm 1, with Poisson sampling): each example's gradient is clipped, and noise is
added to the sum of the gradients.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedhet.errors import ModelError

AT_ONCE = 64  # number of examples whose separate gradients are computed at once in differentially private training


@dataclass
class Privacy:
    """The settings of a client's differentially private training.

    Attributes:
        noise: standard deviation of the noise that is added to the sum of gradients, as a multiple of `clip`.
        clip: largest Euclidean norm of the gradient of one example.
        spend: function that is called before a phase with its sampling rate and number of steps; returns `epsilon`
            after the phase, or raises an error if this exceeds the client's budget.
        generator: random generator (on the CPU) that draws examples and noise.
        epsilon: the privacy budget spent so far.
    """

    noise: float
    clip: float
    spend: Callable[[float, int], float]
    generator: torch.Generator
    epsilon: float = 0.0

    def rows(self, count: int, size: int, steps: int) -> Iterator[Tensor]:
        """Return an iterator over the batches of `steps` steps: indices below `count`, drawn by Poisson sampling.

        Each index is in a batch with probability `size` / `count`. The call spends the privacy budget of all steps.
        """
        rate = min(size / count, 1.0)
        self.epsilon = self.spend(rate, steps)
        draws = (torch.rand(count, generator=self.generator) < rate for _ in range(steps))
        return (drawn.nonzero().flatten() for drawn in draws)

    def backward(
        self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, labels: Tensor, size: int
    ) -> Tensor:
        """Set the private gradients of all parameters that require gradients; return the mean loss, without noise.

        A gradient is the sum of the examples' clipped gradients and the noise, divided by `size`.

        Args:
            model: the network, without layers that normalise over examples.
            loss: function from outputs (1, ...) and labels (1, ...) of one example to its scalar loss.
            inputs: (n, ...) transformed examples; n may be 0.
            labels: (n, ...) labels of the examples.
            size: expected number of examples in a batch.

        Raises:
            ModelError: the gradients of single examples cannot be computed.
        """
        live = {name: each for name, each in model.named_parameters() if each.requires_grad}
        total, mean = {name: torch.zeros_like(each) for name, each in live.items()}, torch.zeros(())

        def of_one(parameters: Mapping[str, Tensor], example: Tensor, label: Tensor) -> Tensor:
            outputs = functional_call(model, {**parameters}, (example[None],))
            return loss(outputs, label[None])

        gradients_of = vmap(grad_and_value(of_one), in_dims=(None, 0, 0), randomness="different")
        values = {name: each.detach() for name, each in live.items()}
        for some, some_labels in zip(inputs.split(AT_ONCE), labels.split(AT_ONCE), strict=True) if len(inputs) else ():
            try:
                gradients, losses = gradients_of(values, some, some_labels)
            except RuntimeError as error:
                raise ModelError(
                    f"dp-noise needs the gradient of each example, and torch.func cannot compute it for this "
                    f"{model._get_name()} ({error}): use another network or leave dp-noise out"
                ) from error
            norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients.values()]).norm(dim=0)
            scale = (self.clip / norms.clamp_min(self.clip)).nan_to_num()
            for name, each in gradients.items():
                total[name] += torch.tensordot(scale, each.nan_to_num(), 1)
            mean = mean + losses.sum() / len(inputs)
        for name, parameter in live.items():
            noise = torch.randn(parameter.shape, generator=self.generator, dtype=parameter.dtype)
            parameter.grad = (total[name] + self.noise * self.clip * noise.to(parameter.device)) / size
        return mean.detach()

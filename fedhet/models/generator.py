"""The generator of FedGen, which generates representations from a class and noise (Zhu et al., ICML 2021)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NOISE, HIDDEN = 32, 256
"""Length of the noise and number of hidden units, as in the authors' code for MNIST."""


class Generator(nn.Module):
    """A network that generates representations of `width` features, with one hidden layer and BatchNorm."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.classes = classes
        self.hidden, self.norm = nn.Linear(NOISE + classes, HIDDEN), nn.BatchNorm1d(HIDDEN)
        self.output = nn.Linear(HIDDEN, width)

    def forward(self, drawn: Tensor) -> Tensor:
        """Return representations (n, width) for inputs (n, NOISE + 1) of noise and, in the last column, classes."""
        classes = F.one_hot(drawn[:, -1].long(), self.classes).to(drawn.dtype)
        outputs: Tensor = self.output(F.relu(self.norm(self.hidden(torch.cat([drawn[:, :-1], classes], 1)))))
        return outputs


def draw(counts: Tensor, rows: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Draw inputs (rows, NOISE + 1) of a `Generator`: uniform noise, and a class drawn in proportion to `counts`."""
    classes = torch.multinomial(counts.double(), rows, replacement=True, generator=generator)
    noise = torch.rand(rows, NOISE, generator=generator, dtype=torch.float64)
    return torch.cat([noise, classes[:, None].double()], 1).to(dtype)

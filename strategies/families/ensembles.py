"""Networks that are made of several clients' networks: their mean prediction, and an aggregator of their outputs."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fedhet import models
from fedhet.errors import ModelError
from fedhet.messages import WireError
from fedhet.models.copies import separated, without_memory
from fedhet.models.representation import in_precision, precision
from fedhet.tasks import LARGEST


class Mean(nn.Module):
    """A network that returns the mean of its members' predictions.

    It returns the log of the mean softmax for classes, the logit of the mean sigmoid for multi-label tasks or a single
    output, and the mean output for regression.
    """

    def __init__(self, members: Sequence[nn.Module], task: str = "classification") -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.task = task

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the mean prediction for inputs (n, ...)."""
        batches = [in_precision(inputs, precision(member)) for member in self.members]
        outputs = torch.stack([member(batch) for member, batch in zip(self.members, batches, strict=True)])
        if self.task in ("regression", "survival"):
            return outputs.mean(0)
        classes = 2 if self.task == "segmentation" else -1  # the axis of classes, after those of members and examples
        if self.task == "multi-label" or outputs.ndim == 2 or outputs.shape[classes] == 1:
            return outputs.sigmoid().mean(0).logit()
        return outputs.softmax(classes).mean(0).log()


class Aggregated(nn.Module):
    """A network that returns A(z) = mean_i z_i + V ReLU(U z + u) + v for the outputs z_i of its members (FENS).

    `members` are M networks by place, each with outputs (n, `outputs`); a place without a network has outputs 0. They
    are in evaluation mode and are not trained. The `aggregator` has 2 M hidden units, and V and v are 0 at first. The
    buffer `architectures` has the names by which networks are built.
    """

    def __init__(self, members: Mapping[str, nn.Module], architectures: Sequence[str], outputs: int) -> None:
        super().__init__()
        count = len(architectures)
        self.outputs = outputs
        self.places = [str(place) for place in range(count)]
        first = nn.Linear(count * outputs, 2 * count)
        last = nn.Linear(2 * count, outputs)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.members = nn.ModuleDict(members)
        self.aggregator = nn.Sequential(first, nn.ReLU(), last)
        self.register_buffer("architectures", torch.tensor([*"\n".join(architectures).encode()], dtype=torch.uint8))

    @classmethod
    def of(cls, arrays: Mapping[str, Tensor], inputs: Tensor, outputs: int, own: nn.Module) -> "Aggregated":
        """Return a network of the members and the aggregator of which `arrays` are the state, without loading it.

        Members, which read batches such as `inputs`, are fedhet's networks by the names of their architectures or, by
        other names, copies of the network `own`. A member whose arrays have other shapes is left out. Raises a
        WireError if the aggregator is not one of as many members as there are names.
        """

        def build(name: str) -> nn.Module:
            try:
                return models.build(name, tuple(inputs.shape[1:]), outputs)
            except ModelError:
                return separated(own)

        absent = torch.empty(0)
        encoded = arrays.get("architectures", absent).flatten().to(torch.uint8)
        names = bytes(encoded.tolist()).decode(errors="replace").split("\n")
        # Memory grows with the square of the number of names, of which a server could send many in a few bytes.
        if arrays.get("aggregator.0.weight", absent).shape != (2 * len(names), len(names) * outputs):
            raise WireError("the server sent an aggregator of other networks than it named: use one version of fedhet")
        members = {}
        for place, name in enumerate(names):
            prefix = f"members.{place}."
            state = without_memory(partial(build, name)).state_dict(prefix=prefix)
            received = {key: tensor.shape for key, tensor in arrays.items() if key.startswith(prefix)}
            if received == {key: tensor.shape for key, tensor in state.items()}:
                members[str(place)] = build(name)
        return cls(members, names, outputs)

    def train(self, mode: bool = True) -> "Aggregated":
        """Set the mode of the aggregator; members stay in evaluation mode."""
        super().train(mode)
        self.members.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """Return A(z) (n, `outputs`) for inputs (n, ...)."""
        silent = torch.zeros(len(inputs), self.outputs, device=inputs.device)
        with torch.no_grad():
            outputs = torch.stack([self.members[p](inputs) if p in self.members else silent for p in self.places], 1)
        # One client's broken network could end training by NaN, or by outputs whose square is beyond the largest loss.
        outputs = outputs.where(outputs.abs() < LARGEST**0.5, 0.0)
        outputs = outputs.to(next(self.aggregator.parameters()).dtype)
        aggregated: Tensor = outputs.mean(1) + self.aggregator(outputs.flatten(1))
        return aggregated

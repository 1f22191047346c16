"""Client side of PerFCL: trains a shared and a personal extractor with a common head and two contrastive losses."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedhet.algorithms.contrast import contrast
from fedhet.client import ClientSide, Loss, Payload, Step, Term
from fedhet.errors import ModelError
from fedhet.methods.options import Config
from fedhet.models.copies import separated
from fedhet.models.representation import Representation, head_name
from fedhet.strategies.perfcl import Keys


class TwoExtractors(nn.Module):
    """A network without its `head`, and a copy of it, whose outputs a new head reads side by side."""

    def __init__(self, network: nn.Module, name: str, head: nn.Linear) -> None:
        super().__init__()
        self.replaced = name
        self.config = getattr(network, "config", None)  # of texts, names the token that pads
        network.set_submodule(name, nn.Identity())
        self.shared = network
        self.personal = separated(network)
        self.head = nn.Linear(2 * head.in_features, head.out_features, dtype=head.weight.dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        try:
            outputs: Tensor = self.head(torch.cat([self.shared(inputs), self.personal(inputs)], -1))
        except (AttributeError, RuntimeError, TypeError) as error:
            try:  # the network alone was checked: without the head, it also fails for few examples
                with torch.no_grad():
                    features = self.shared(inputs[:2])
                    self.head(torch.cat([features, features], -1))
            except (AttributeError, RuntimeError, TypeError):
                raise ModelError(
                    f"perfcl replaces the head, here {self.replaced!r}, which must be the last layer, but without it "
                    f"the network fails with {error}: name the last layer by the key head, or choose another method"
                ) from error
            raise  # for other causes, such as a full memory
        return outputs


class PerFCL(ClientSide[Keys]):
    remembers = True

    @classmethod
    def adapt(cls, model: nn.Module, config: Config) -> nn.Module:
        name = head_name(model, config.head)
        head = model.get_submodule(name)
        if not isinstance(head, nn.Linear) or not name:
            kind = type(head).__name__
            raise ModelError(
                f"perfcl needs layers before an nn.Linear as head, but {name} is a {kind}: set the key head"
            )
        return TwoExtractors(model, name, head)

    @classmethod
    def head_of(cls, config: Config) -> str:
        return "head"

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        client = self.client
        keys = self.options
        # Before the client has trained, nothing is compared with its last round.
        if not client.memory or not (keys.mu or keys.gamma):
            return ()
        received = {name: tensor.clone() for name, tensor in client.tensors.items()}
        constants: dict[str, Any] = {"phi": client.representation, "received": received, "previous": client.memory}
        constants |= {"mu": keys.mu, "gamma": keys.gamma, "temperature": keys.temperature}
        return (Term(double_contrast, captures={"phi": client.representation}, weighted=True, **constants),)

    def end(self, payload: Payload) -> Payload:
        tensors = self.client.tensors.items()
        self.client.memory = {name: tensor for name, tensor in tensors if name.startswith("shared.")}
        return super().end(payload)


def double_contrast(
    step: Step,
    phi: Representation,
    received: Mapping[str, Tensor],
    previous: Mapping[str, Tensor],
    mu: float,
    gamma: float,
    temperature: float,
) -> Tensor:
    """Return PerFCL's two contrastive losses of a step, weighted by `mu` and `gamma`.

    `received` are the network's arrays before training, and `previous` the shared extractor's after the last round.
    """
    shared, personal = step.captured["phi"].chunk(2, 1)
    average, last_personal = step.by(received, phi).chunk(2, 1)
    last_shared, _ = step.by(previous, phi).chunk(2, 1)
    near = contrast(shared, average, last_shared, temperature=temperature)
    apart = contrast(personal, last_personal, average, temperature=temperature)
    return step.mean(mu * near + gamma * apart)

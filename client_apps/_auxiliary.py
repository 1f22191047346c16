"""Base classes of methods that train an auxiliary network, which clients share, together with the client's own."""

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fedhet import models
from fedhet.client import Client, ClientSide
from fedhet.client.client_side import P
from fedhet.errors import ModelError
from fedhet.messages import Payload
from fedhet.methods.included.distillation import AuxiliaryOptions
from fedhet.methods.keys import kebab
from fedhet.models.copies import kinds_of
from fedhet.models.representation import Output, Representation, head_name, in_precision, precision
from fedhet.training import Phase, reestimate
from fedhet.utils.randomness import seeded

B = TypeVar("B", bound=AuxiliaryOptions)

SMALL = "small"
"""Name of the auxiliary network's outputs among the captured values that loss terms receive."""


class AuxiliaryModel(ClientSide[P]):
    """Client side with an auxiliary network of the same architecture on all clients, which is sent and received.

    The client's own network, whose architecture can differ between clients, is not sent.

    Attributes:
        key: name of the option that sets the architecture of the auxiliary network.
        reason: why the method needs class scores, as a clause of an error message.
        auxiliary: the auxiliary network.
    """

    key: ClassVar[str]
    reason: ClassVar[str]

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        client.check_scores(self.reason)
        self.auxiliary = _build(client, getattr(self.options, self.key), self.key)

    @property
    def network(self) -> nn.Module:
        """The auxiliary network."""
        return self.auxiliary

    def shared(self) -> dict[str, Tensor]:
        """Return the auxiliary network's tensors, with running statistics only if they are aggregated."""
        aggregated, kinds = self.client.config.batch_norm == "aggregate", kinds_of(self.auxiliary)
        tensors = self.auxiliary.state_dict().items()
        return {name: tensor for name, tensor in tensors if aggregated or kinds[name] != "statistic"}

    def begin(self, payload: Payload) -> None:
        """Load the received auxiliary network; re-estimate its running statistics if they were not sent."""
        super().begin(payload)
        if "model" in payload.arrays and self.client.config.batch_norm != "aggregate":
            reestimate(self.auxiliary, self.client.data.train.inputs, self.client.transform)


def _build(client: Client, name: str, key: str) -> nn.Module:
    """Build a float32 network for a client's examples, with as many outputs as the client's own network.

    Args:
        client: the client.
        name: the architecture; empty for the first configured architecture (`fedhet.models.build_auxiliary`).
        key: the option that sets the architecture; the initial weights depend on it and, without `shared-init`, on the
            client.

    Raises:
        ModelError: the network cannot process the client's examples.
    """
    config = client.config
    client.model.eval()
    purpose = key.replace("_", " "), "all" if config.shared_init else client.name
    with seeded(config.seed, *purpose), torch.no_grad():
        batch = client.transform(client.data.train.inputs[:1])
        outputs = client.model(batch).shape[-1]
        try:
            network = models.build_auxiliary(name, config.architectures, batch, outputs).to(client.device)
        except ModelError as error:
            why = re.sub("^model '[^']*': ", "", str(error))  # the user may not know the name, if a preset chose it
            raise ModelError(f"{config.family}.{kebab(key)}: {why}; set it to a model for these inputs") from error
    if (dtype := precision(network)) and client.precision not in (None, dtype):
        network.register_forward_pre_hook(lambda _module, inputs: tuple(in_precision(each, dtype) for each in inputs))
    return network


class Pair(nn.Module):
    """Two networks that are trained together. Returns the outputs of `own`; the outputs of `small` can be captured.

    Args:
        network: the client's network, stored as `own`.
        small: the auxiliary network.
        projector: a linear layer between the representations of the two networks, if the method has one.
    """

    def __init__(self, network: nn.Module, small: nn.Module, projector: nn.Linear | None = None) -> None:
        super().__init__()
        self.own, self.small, self.projector = network, small, projector or nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        """Pass a batch through both networks; return the outputs of the client's network."""
        self.small(inputs)
        outputs: Tensor = self.own(inputs)
        return outputs


class Mutual(AuxiliaryModel[B]):
    """Trains the client's network and the auxiliary network together; the client's network is evaluated."""

    key, reason = "shared_model", "which the two networks exchange"

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.pair = Pair(client.model, self.auxiliary)

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return one phase that trains both networks."""
        client, captures, terms = self.client, {SMALL: Output(self.pair, SMALL)}, self.terms(payload)
        return [Phase(client.request.epochs, client.optimisation(), module=self.pair, captures=captures, terms=terms)]


class Projected(Mutual[B]):
    """Trains both networks and a linear projector between their representations, which stays on the client."""

    remembers = True

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        config, self.small_head = client.config, head_name(self.auxiliary)
        client.model.eval()
        self.auxiliary.eval()
        with seeded(config.seed, "projector", "all" if config.shared_init else client.name), torch.no_grad():
            inputs = client.transform(client.data.train.inputs[:1])
            phi, shared = client.representation(inputs), Representation(self.auxiliary, self.small_head)(inputs)
            self.pair = self.join(phi.shape[1], shared.shape[1], phi.dtype).to(client.device)

    @abstractmethod
    def join(self, width: int, small_width: int, dtype: torch.dtype) -> Pair:
        """Return both networks with a new projector for representations of the given widths.

        Args:
            width: width of the client's representation.
            small_width: width of the auxiliary network's representation.
            dtype: dtype of the client's representation.
        """

    def begin(self, payload: Payload) -> None:
        """Load the received auxiliary network and the client's saved projector."""
        super().begin(payload)
        if memory := self.client.memory:
            self.pair.projector.load_state_dict({name: memory[name] for name in self.pair.projector.state_dict()})

    def end(self, payload: Payload) -> Payload:
        """Return the auxiliary network, and keep the projector on the client."""
        self.client.memory |= self.pair.projector.state_dict()
        return super().end(payload)

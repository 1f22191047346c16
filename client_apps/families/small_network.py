"""Base classes of client sides that train and send a small network, of one architecture for all clients."""

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fedhet import models
from fedhet.client import Client, ClientSide, Payload
from fedhet.client.client import P
from fedhet.errors import ModelError
from fedhet.methods.options import kebab
from fedhet.models.copies import kinds_of
from fedhet.models.representation import Capturing, Output, Representation, head_name, in_precision, precision
from fedhet.strategies.families.small_network import SmallNetworkKeys
from fedhet.training import Phase, reestimate
from fedhet.utils.randomness import seeded

B = TypeVar("B", bound=SmallNetworkKeys)

SMALL = "small"
"""Name of the auxiliary network's outputs in `Step.captured`."""


class AuxiliaryModel(ClientSide[P]):
    """Base class of client sides that send only an auxiliary network, which has the same architecture on all clients.

    The option named `key` sets this architecture. `reason` says, in error messages, why the method needs class scores.
    """

    key: ClassVar[str]
    reason: ClassVar[str]

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        client.check_scores(self.reason)
        self.auxiliary = _build(client, getattr(self.options, self.key), self.key)

    @property
    def network(self) -> nn.Module:
        return self.auxiliary

    def shared(self) -> dict[str, Tensor]:
        aggregated = self.client.config.batch_norm == "aggregate"
        kinds = kinds_of(self.auxiliary)
        tensors = self.auxiliary.state_dict().items()
        return {name: tensor for name, tensor in tensors if aggregated or kinds[name] != "statistic"}

    def begin(self, payload: Payload) -> None:
        super().begin(payload)
        if "model" in payload.arrays and self.client.config.batch_norm != "aggregate":
            reestimate(self.auxiliary, self.client.data.train.inputs, self.client.transform)


def _build(client: Client, name: str, key: str) -> nn.Module:
    config = client.config
    client.model.eval()
    purpose = key.replace("_", " "), "all" if config.shared_init else client.name
    with seeded(config.seed, *purpose), torch.no_grad():
        batch = client.transform(client.data.train.inputs[:2])
        outputs = client.read(client.data.train.inputs[:2]).shape[-1]
        try:
            network = models.build_auxiliary(name, config.architectures, batch, outputs).to(client.device)
        except ModelError as error:
            # The user may not know the name of the model, if a preset chose it.
            reason = re.sub("^model '[^']*': ", "", str(error))
            message = f"key {config.family}.{kebab(key)}: {reason}; set a model for the client's inputs"
            raise ModelError(message) from error
    if hasattr(client.model, "config"):  # of texts, names the token that pads
        network.config = client.model.config
    if (dtype := precision(network)) and client.representation.precision not in (None, dtype):
        network.register_forward_pre_hook(lambda _module, inputs: tuple(in_precision(batch, dtype) for batch in inputs))
    return network


class Pair(nn.Module):
    """The client's network `own` and the shared network `small`; runs both and returns the outputs of `own`.

    `projector` is a linear layer between the two networks' representations, if the method has one.
    """

    def __init__(self, network: nn.Module, small: nn.Module, projector: nn.Linear | None = None) -> None:
        super().__init__()
        self.own = network
        self.small = small
        self.projector = projector or nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        self.small(inputs)
        return self.own(inputs)


class Mutual(AuxiliaryModel[B]):
    """Base class of client sides that train the client's and a shared network together, and evaluate the client's."""

    key = "shared_model"
    reason = "which the two networks exchange"

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.pair = Pair(client.model, self.auxiliary)

    @property
    def captures(self) -> dict[str, Capturing]:
        return {SMALL: Output(self.pair, SMALL)}

    def phases(self, payload: Payload) -> Sequence[Phase]:
        return [replace(phase, module=self.pair) for phase in super().phases(payload)]


class Projected(Mutual[B]):
    """Base class of client sides that train the client's network, a shared one, and a projector of representations.

    The projector is a linear layer that reads the shared network's representation or, in FedMRL, both representations.
    """

    remembers = True

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        config = client.config
        self.small_head = head_name(self.auxiliary)
        client.model.eval()
        self.auxiliary.eval()
        with seeded(config.seed, "projector", "all" if config.shared_init else client.name), torch.no_grad():
            phi = client.read(client.data.train.inputs[:2], until=client.representation)
            shared = Representation(self.auxiliary, self.small_head)(client.transform(client.data.train.inputs[:2]))
            self.pair = self.join(phi.shape[1], shared.shape[1], phi.dtype).to(client.device)

    @abstractmethod
    def join(self, width: int, small_width: int, dtype: torch.dtype) -> Pair:
        """Return the client's and the shared network as a `Pair`, with a new projector of type `dtype`.

        `width` and `small_width` are the lengths of the client's and the shared network's representations.
        """

    def begin(self, payload: Payload) -> None:
        super().begin(payload)
        if memory := self.client.memory:
            self.pair.projector.load_state_dict({name: memory[name] for name in self.pair.projector.state_dict()})

    def end(self, payload: Payload) -> Payload:
        self.client.memory |= self.pair.projector.state_dict()
        return super().end(payload)

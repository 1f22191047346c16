"""Networks: module objects that one client after the other uses, each for one message alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedhet.errors import ModelError
from fedhet.representations import Representation
from fedhet.representations.precision import fitted, in_precision, precision
from fedhet.sharing import NetworkDescription, Sharing

KEPT = 64
"""Networks that a process keeps for the clients to come."""


class Network:
    """A model with its head, its architecture's name, and its state dict, which shares its memory.

    Attributes:
        precision: the floating dtype that the model computes in; None without parameters.

    Raises:
        ModelError: the model has no such head, or holds complex numbers.
    """

    def __init__(self, model: nn.Module, head: str, architecture: str) -> None:
        self.representation = Representation(model, head)
        self.architecture = architecture
        self.device = torch.device("cpu")
        self._read()
        if odd := next((name for name, tensor in self._tensors.items() if tensor.is_complex()), None):
            raise ModelError(f"{type(model).__name__}'s {odd} holds complex numbers, which no method shares or saves")

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.representation.model

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The state dict; a buffer that the model has bound anew since is the new one."""
        if any(held.get(name) is not known for held, name, known in self._buffers):
            self._read()
        return self._tensors

    def _read(self) -> None:
        self._tensors = self.model.state_dict()
        self._shared: tuple[object, dict[str, str]] | None = None
        held = [module._buffers for module in self.model.modules()]  # looked into for every message
        self._buffers = [(buffers, name, buffer) for buffers in held for name, buffer in buffers.items()]
        self.precision = precision(self.model)

    def takes(self, transform: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """A transformation whose results are of the model's dtype, where that is not float32."""
        return fitted(transform, self.precision)

    def beside(self, tensor: Tensor) -> Tensor:
        """Return a tensor that is compared with the model's values: on its device, and floats in its dtype."""
        return in_precision(tensor.to(self.device), self.precision)

    def shared_names(self, shares: Sharing, *, statistics: bool) -> dict[str, str]:
        """See `Sharing.names`; found out once, and not to be written into."""
        tensors, asked = self.tensors, (shares, statistics)
        if self._shared is None or self._shared[0] != asked:
            described = NetworkDescription(self.model, self.representation.head, self.architecture)
            self._shared = asked, shares.names(described, tensors, statistics=statistics)
        return self._shared[1]

    def to(self, device: torch.device) -> "Network":
        """The same network on a device, where it stays."""
        if device != self.device:
            self.model.to(device)
            self.device = device
            self._read()
        return self


class Networks:
    """The networks that are not in use, by what they are built for; those that were not used for long are let go."""

    def __init__(self) -> None:
        self._free: list[tuple[object, Network]] = []

    @contextmanager
    def lend(self, key: object, build: Callable[[], Network]) -> Iterator[Network]:
        """A network in whatever state, for the time of the context.

        Args:
            key: networks of equal keys are built alike.
            build: makes one if none is free.
        """
        place = next((i for i in reversed(range(len(self._free))) if self._free[i][0] == key), None)
        network = build() if place is None else self._free.pop(place)[1]
        try:
            yield network
        finally:
            self._free.append((key, network))
            del self._free[:-KEPT]

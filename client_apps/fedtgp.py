"""FedTGP, client side: FedProto, with prediction by the prototypes of all classes (Zhang et al., AAAI 2024)."""

import torch
from torch import Tensor

from .fedproto import FedProto  # noqa: TID251 - this folder is fedhet.client_apps


class FedTGP(FedProto):
    """Trains representations (Phi) towards the server's prototypes; sends the client's mean Phi of each class."""

    def candidates(self) -> Tensor:
        """Return the rows of all global prototypes, (classes,) int64, since all classes are predicted by prototypes."""
        return torch.arange(len(self.classes), device=self.client.device)

r"""FedKD, client side: the client's own network and a shared network learn from each other (Wu et al., 2022).

    L_own    = CE(own, y)    + [KL(shared || own) + MSE(H_own, W H_shared)] / s
    L_shared = CE(shared, y) + [KL(own || shared) + MSE(H_own, W H_shared)] / s,    s = CE(own, y) + CE(shared, y)

where H are representations, the projector W stays on the client, and s and the target of each KL are constants. One
step trains both networks and W. The change of the shared network is sent as truncated (low-rank) factors.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.messages import Arrays, Payload, spec_of, to_arrays, to_tensor
from fedhet.messages.factors import pack, unpack
from fedhet.methods.included.distillation import AuxiliaryOptions, energy
from fedhet.models.representation import Representation
from fedhet.training import Loss, Phase, Step, Term

from ._auxiliary import SMALL, Pair, Projected  # noqa: TID251 - this folder is fedhet.client_apps

LEAST = 1e-3
"""The smallest s, which bounds the steps of networks that make no mistake."""

RECEIVED = "received/"
"""Prefix of the received shared network's tensors in the client's memory."""


class FedKD(Projected[AuxiliaryOptions]):
    """Trains two networks by mutual distillation; the shared network's change is sent as low-rank factors."""

    lost = False

    def join(self, width: int, small_width: int, dtype: torch.dtype) -> Pair:
        """Return both networks with a new projector, which has no bias."""
        return Pair(self.client.model, self.auxiliary, nn.Linear(small_width, width, bias=False, dtype=dtype))

    def begin(self, payload: Payload) -> None:
        """Load the shared network, which the server may send as its change since the last message."""
        self.received = payload.arrays.get("model", {})
        if payload.values.get("change"):
            self.lost, dtype = not self.client.memory, self.client.config.wire_dtype
            change, spec, before = self.received, spec_of(self.shared()), self._received_before()
            self.received = {} if self.lost else unpack(change, before, spec, dtype, "the shared network's change")
        super().begin(Payload({"model": self.received}))

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return one phase that trains both networks and the projector; none if the client lost the shared network."""
        (phase,) = super().phases(payload)
        small = Representation(self.pair, f"small.{self.small_head}".rstrip("."))
        captures = {**phase.captures, "own": self.client.representation, "shared": small}
        return [] if self.lost else [replace(phase, captures=captures)]

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        """Return a term with the shared network's loss, and the distillation between both networks."""
        return (Term(mutual),)

    def end(self, payload: Payload) -> Payload:
        """Return the factors of the shared network's change; keep the received network and the projector."""
        reply, client = super().end(payload), self.client
        if self.lost:
            return Payload()
        client.memory |= {f"{RECEIVED}{name}": to_tensor(array) for name, array in self.received.items()}
        part = energy(client.request.round, client.config.rounds)
        update = pack(to_arrays(self.shared()), self.received, part, client.config.wire_dtype)
        return Payload({"update": update}, reply.values)

    def _received_before(self) -> Arrays:
        memory = self.client.memory.items()
        return to_arrays({key.removeprefix(RECEIVED): each for key, each in memory if key.startswith(RECEIVED)})


def mutual(step: Step) -> Tensor:
    """Return the shared network's loss, and the distillation between both networks."""
    shared, hidden = step.captured[SMALL].to(step.outputs.dtype), step.captured["own"]
    shared_loss = step.loss(shared)
    both = (step.loss(step.outputs) + shared_loss).detach().clamp(min=LEAST)
    learnt, taught = step.divergence(step.outputs, shared), step.divergence(shared, step.outputs)
    projected = F.linear(step.captured["shared"].to(hidden.dtype), step.parameters["projector.weight"])
    return shared_loss + (learnt + taught + F.mse_loss(projected, hidden)) / both

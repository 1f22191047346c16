"""Client side of FedKD: mutual distillation of two networks; sends low-rank factors of the shared network's change."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.messages import Payload, spec_of, to_arrays, to_tensor
from fedhet.messages.payload import from_factors, to_factors
from fedhet.models.representation import Representation
from fedhet.strategies.families.small_network import SmallNetworkKeys
from fedhet.strategies.fedkd import energy
from fedhet.training import Loss, Step, Term

from .families.small_network import SMALL, Pair, Projected

LEAST = 1e-3
"""The smallest value by which distillation losses are divided, if the sum of the two task losses is less."""

RECEIVED = "received/"
"""Prefix of the received shared network's tensors in the client's memory."""


class FedKD(Projected[SmallNetworkKeys]):
    def join(self, width: int, small_width: int, dtype: torch.dtype) -> Pair:
        return Pair(self.client.model, self.auxiliary, nn.Linear(small_width, width, bias=False, dtype=dtype))

    def begin(self, payload: Payload) -> None:
        self.received = payload.arrays.get("model", {})
        if payload.values.get("change"):
            memory = self.client.remembered.items()
            before = {key.removeprefix(RECEIVED): tensor for key, tensor in memory if key.startswith(RECEIVED)}
            spec = spec_of(self.shared())
            self.received = from_factors(self.received, to_arrays(before), spec, "the shared network's change")
        super().begin(Payload({"model": self.received}))

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        small = Representation(self.pair, f"small.{self.small_head}".rstrip("."))
        captures = self.captures | {"own": self.client.representation, "shared": small}
        return (Term(mutual_with_hidden, captures=captures, weighted=True),)

    def end(self, payload: Payload) -> Payload:
        client = self.client
        reply = super().end(payload)
        client.memory |= {f"{RECEIVED}{name}": to_tensor(array) for name, array in self.received.items()}
        part = energy(client.request.round, client.config.rounds)
        update = to_factors(to_arrays(self.shared()), self.received, part)
        return Payload({"update": update}, reply.values)


def mutual_with_hidden(step: Step) -> Tensor:
    """Return FedKD's loss of both networks, except for the task loss of the client's own network."""
    shared = step.captured[SMALL].to(step.outputs.dtype)
    hidden = step.captured["own"]
    shared_loss = step.loss(shared)
    both = (step.loss(step.outputs) + shared_loss).detach().clamp(min=LEAST)
    learnt = step.divergence(step.outputs, shared)
    taught = step.divergence(shared, step.outputs)
    projected = F.linear(step.captured["shared"].to(hidden.dtype), step.parameters["projector.weight"])
    apart = step.mean((projected - hidden).square())
    return shared_loss + (learnt + taught + apart) / both

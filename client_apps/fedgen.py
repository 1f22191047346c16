"""Client side of FedGen: adds the head's loss for generated representations to the task's loss."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.messages import Payload, load_into, to_tensor
from fedhet.models.networks import Generator, draw
from fedhet.strategies.fedgen import Keys
from fedhet.training import Loss, Step, Term

from .families.by_class import SameWidth, class_counts


class FedGen(SameWidth[Keys]):
    def handshake(self, payload: Payload) -> Payload:
        self.check_linear_head("the server generates the head's inputs")
        return Payload({"classes": class_counts(self.client, f"{self.client.head}.weight")})

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        client = self.client
        weight = self.options.weight
        if not weight or "generator" not in payload.arrays:
            return ()
        head = cast(nn.Linear, client.model.get_submodule(client.head))
        dtype = head.weight.dtype
        generator = Generator(*head.weight.shape).to(client.device, dtype).eval()
        load_into(generator.state_dict(), payload.arrays["generator"])
        counts = to_tensor(payload.arrays["classes"]["counts"])

        def drawn(number: int, examples: int) -> dict[str, Tensor]:
            noise = draw(counts, examples, client.generator("generated", number), dtype).to(client.device)
            with torch.no_grad():
                return {"inputs": generator(noise), "labels": noise[:, -1].long()}

        return (Term(generated, draw=drawn, weighted=True, head=head, weight=weight),)


def generated(step: Step, inputs: Tensor, labels: Tensor, head: nn.Linear, weight: float) -> Tensor:
    """Return `weight` times the loss of `head` by `step.task`, for generated representations (n, d) and labels (n,)."""
    return weight * step.loss(F.linear(inputs, head.weight, head.bias), labels)

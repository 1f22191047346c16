r"""FedGen, client side: the head also learns from generated representations (Zhu et al., ICML 2021, equation 5).

    L = CE(h(Phi(x)), y') + weight CE(h(G(e, y)), y)

where h is the head, Phi(x) the representation of an example with label y', and G the server's generator. G receives
noise e and a class y, drawn in proportion to the number of examples of all clients.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhet.messages import Payload, load_into, to_tensor
from fedhet.methods.included.prototypes import FedGenOptions
from fedhet.models.generator import Generator, draw
from fedhet.training import Loss, Step, Term

from .fedproto import SameWidth
from .pfnm import class_counts


class FedGen(SameWidth[FedGenOptions]):
    """Adds the head's loss on generated representations to the task's loss."""

    def handshake(self, payload: Payload) -> Payload:
        self.check_linear_head("the server generates its inputs")
        return Payload({"classes": class_counts(self.client, f"{self.client.head}.weight")})

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        """Return a term with the head's loss on generated representations; no term before the generator is trained."""
        client, name, weight = self.client, self.client.head, self.options.weight
        if not weight or "generator" not in payload.arrays:
            return ()
        head = client.tensors[f"{name}.weight"]
        dtype = head.dtype
        generator = Generator(*head.shape).to(client.device, dtype).eval()
        load_into(generator.state_dict(), payload.arrays["generator"])
        counts = to_tensor(payload.arrays["classes"]["counts"])

        def drawn(number: int, examples: int) -> dict[str, Tensor]:
            noise = draw(counts, examples, client.generator("generated", number), dtype).to(client.device)
            with torch.no_grad():
                return {"inputs": generator(noise), "labels": noise[:, -1].long()}

        return (Term(generated, draw=drawn, head=name, weight=weight),)


def generated(step: Step, inputs: Tensor, labels: Tensor, head: str, weight: float) -> Tensor:
    """Return the head's loss on generated representations."""
    scores = F.linear(inputs, step.parameters[f"{head}.weight"], step.parameters[f"{head}.bias"])
    return weight * step.task.loss(scores, labels)

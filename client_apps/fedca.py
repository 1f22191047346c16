"""Client side of FedCA: FedSimCLR's with a received dictionary and base network; sends projections of examples."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhet.messages import Payload, to_arrays, to_tensor
from fedhet.models.representation import Representation
from fedhet.strategies.families.contrast import contrast_of_views
from fedhet.strategies.fedca import Keys
from fedhet.training import Loss, Phase, Step, Term
from fedhet.utils.machine import brought

from .families.contrast import LinearEvaluation


class FedCA(LinearEvaluation[Keys]):
    def phases(self, payload: Payload) -> Sequence[Phase]:
        # Projections are of single examples, which a node with `min-examples` does not disclose.
        sends = self.options.samples > 0 and self.client.least <= 1
        # All clients' projections are by the received network, so that they can be compared.
        self.sent = to_arrays({"projections": self.projections()}) if sends else {}
        return super().phases(payload)

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        client = self.client
        phi = client.representation
        keys = self.options
        dictionary = None
        if sent := payload.arrays.get("dictionary"):
            dictionary = client.to_device(to_tensor(sent["projections"]))
        constants = {"temperature": keys.temperature, "dictionary": dictionary}
        terms = [Term(contrast_of_views, captures={"phi": phi}, phi=phi, **constants)]
        if base := payload.arrays.get("base"):
            arrays = {name: to_tensor(array).to(client.device) for name, array in base.items()}
            terms.append(Term(misalignment, captures={"phi": phi}, phi=phi, base=arrays, beta=keys.beta))
        return tuple(terms)

    def end(self, payload: Payload) -> Payload:
        reply = super().end(payload)
        if self.sent:
            reply.arrays["dictionary"] = self.sent
        return reply

    def projections(self) -> Tensor:
        """Return the projections (k, width) of k examples, drawn anew in each round."""
        client = self.client
        train = client.data.train
        drawn = torch.randperm(len(train), generator=client.generator("dictionary"))[: self.options.samples]
        inputs, _ = train.at(brought(drawn, train.labels.device))
        phi = client.read(inputs, until=client.representation)
        projector = client.model.get_submodule(f"{client.head.removesuffix('head')}projector")
        with torch.no_grad():
            projections: Tensor = projector(phi)
        return projections.float()


def misalignment(step: Step, phi: Representation, base: Mapping[str, Tensor], beta: float) -> Tensor:
    """Return `beta` times the mean squared distance of a step's representations, of length 1, to the base network's."""
    ours = F.normalize(step.captured["phi"], dim=1)
    theirs = F.normalize(step.by(base, phi), dim=1)
    return beta * (ours - theirs).square().sum(1).mean()

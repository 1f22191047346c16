"""Client side of FedSimCLR: trains the encoder by the contrastive loss of two views of each example."""

from torch import Tensor

from fedhet.algorithms.contrast import nt_xent
from fedhet.messages import Payload
from fedhet.models.representation import Representation
from fedhet.strategies.fedsimclr import Keys
from fedhet.training import Loss, Step, Term

from .families.contrast import LinearEvaluation


class FedSimCLR(LinearEvaluation[Keys]):
    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        phi = self.client.representation
        return (Term(contrast_of_views, captures={"phi": phi}, phi=phi, temperature=self.options.temperature),)


def contrast_of_views(step: Step, phi: Representation, temperature: float) -> Tensor:
    """Return the NT-Xent loss of the projections of a step's two views."""
    first, second = step.beside("projector", phi, step.captured["phi"]).chunk(2)
    return nt_xent(first, second, temperature)

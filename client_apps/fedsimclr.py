"""Client side of FedSimCLR: trains the encoder by the contrastive loss of two views of each example."""

from fedhet.messages import Payload
from fedhet.strategies.families.contrast import contrast_of_views
from fedhet.strategies.fedsimclr import Keys
from fedhet.training import Loss, Term

from .families.contrast import LinearEvaluation


class FedSimCLR(LinearEvaluation[Keys]):
    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        phi = self.client.representation
        return (Term(contrast_of_views, captures={"phi": phi}, phi=phi, temperature=self.options.temperature),)

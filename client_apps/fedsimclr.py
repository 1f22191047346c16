"""Client side of FedSimCLR: trains the encoder by the contrastive loss of two views of each example."""

from fedhet.client import Loss, Payload, Term
from fedhet.strategies.families.contrast import contrast_of_views
from fedhet.strategies.fedsimclr import Keys

from .families.contrast import LinearEvaluation


class FedSimCLR(LinearEvaluation[Keys]):
    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        phi = self.client.representation
        return (Term(contrast_of_views, captures={"phi": phi}, phi=phi, temperature=self.options.temperature),)

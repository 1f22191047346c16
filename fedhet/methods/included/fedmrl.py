"""FedMRL (Yi et al., "Federated Model Heterogeneous Matryoshka Representation Learning", NeurIPS 2024)."""

from dataclasses import dataclass

from fedhet.methods.included.fml import TRAITS, AuxiliaryOptions
from fedhet.methods.method import Method
from fedhet.methods.options import option


@dataclass(frozen=True)
class FedMRLOptions(AuxiliaryOptions):
    """FedMRL's own configuration keys, with the paper's values."""

    width: int = option(
        0, "width d1 to which the shared network's representation is pooled; 0: unchanged", at_least=0, at_most=2**16
    )


method = Method("fedmrl", traits=TRAITS, Options=FedMRLOptions)

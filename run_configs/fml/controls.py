"""Control of FML, FedKD and FedMRL: FedAvg of the shared network, without the clients' own networks.

What a method with a network beside the clients' own gives beyond this is what the own networks add. It takes FML's
keys, of which `shared-model` counts, and is named on the command line by file and name:

    fedhet compare fml alone=run_configs/fml/controls.py:shared_alone --config run_configs/fml/digits.toml
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from fedhet.client_apps.fml import FML
from fedhet.messages import Payload
from fedhet.methods.method import Traits
from fedhet.strategies.fml import FML as FMLServer
from fedhet.training import Phase


class SharedAlone(FML):
    """Train the shared network on the labels, and score it."""

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return one phase, which trains the shared network."""
        return [Phase(self.client.request.epochs, self.client.optimisation(), module=self.auxiliary)]

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor] | None:
        """Return the shared network, whose outputs are scored."""
        return self.auxiliary


TRAITS = Traits(common_init=True, sends={"model": "weights"})
"""FML's, but that clients keep nothing of their own and are scored with what they received, as in FedAvg."""

shared_alone = FMLServer.method.variant("fml-shared-alone", client=SharedAlone, traits=TRAITS)

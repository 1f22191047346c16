"""FedCA (Zhang et al., FITEE 2023): FedSimCLR with a dictionary of projections and alignment to a base network.

    client i:  L(w) = mean over the 2N views of a batch of l(k, k') + beta ||u(Phi_w(x)) - u(Phi_B(x))||^2
               l(k, k') = -log(exp(cos(z_k, z_k') / tau) / [sum_(m != k) exp(cos(z_k, z_m) / tau)
                                                            + sum_(d in D) exp(cos(z_k, d) / tau)])
    server:    w(t) = sum_i n_i w_i(t) / sum_i n_i

z = g(Phi_w(x)) is the projection of a view x of an example, k and k' are the two views of one example, u(v) is
v / |v|. D has the last projections of examples that other clients sent. The base network B is trained once by the
server, by SimCLR on the public examples. Clients are evaluated by a linear classifier on Phi, which is trained on
labels for this.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedhet.messages import check
from fedhet.models.representation import Representation
from fedhet.server import Arrays, ArraysBy, Payload, Reply, State, Traits, in_order, method, option
from fedhet.training import Optimisation, Phase, Term

from .families.contrast import EncoderKeys, ViewsAtServer, contrast_of_views, encoder_traits


@dataclass(frozen=True)
class Keys(EncoderKeys):
    public_at_server = True
    temperature: float = option(0.5, "tau, the temperature of the contrastive loss", above=0)
    beta: float = option(0.01, "weight of the distance to the base network's representations", at_least=0)
    samples: int = option(128, "largest number of projections that a client sends; 0: none", at_least=0, at_most=2**16)
    base_epochs: int = option(100, "number of epochs for which the server trains the base network", at_least=1)
    base_learning_rate: float = option(0.001, "learning rate of the base network's Adam", above=0)


@dataclass
class Dictionary(State):
    """The state of FedCA: `sent` has each client's last `projections` (k, width), `base` the base network's arrays."""

    sent: ArraysBy = field(default_factory=dict)
    base: Arrays = field(default_factory=dict)


def traits(keys: Keys) -> Traits:
    """Return the traits of FedCA: those of encoders, a public dataset, and projections of examples."""
    needed = replace(encoder_traits(keys), sends={"dictionary": "projections"})
    return needed if needed.public == "labelled" else replace(needed, public="inputs")


@method("fedca", traits, Keys, client="fedhet.client_apps.fedca:FedCA")
class FedCA(ViewsAtServer[Keys, Dictionary]):
    """FedCA: the average of encoders that clients train without labels, with projections of other clients' examples."""

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        if self.options.beta and not self.state.base:
            self.state.base = self.base()
        payloads = super().configure_fit(round, clients)
        for client, payload in payloads.items():
            others = [self.state.sent[other]["projections"] for other in in_order(self.state.sent) if other != client]
            if others:
                payload.arrays["dictionary"] = {"projections": np.concatenate(others)}
            if self.state.base:
                payload.arrays["base"] = self.state.base
        return payloads

    def base(self) -> Arrays:
        """Return the arrays of the base network, trained on views of the public dataset, that clients share."""
        weights = self.state.model
        keys = self.options

        def phase(phi: Representation) -> Phase:
            steps = Optimisation("adam", keys.base_learning_rate, batch_size=self.config.batch_size)
            term = Term(contrast_of_views, captures={"phi": phi}, phi=phi, temperature=keys.temperature)
            return Phase(keys.base_epochs, steps, terms=(term,))

        arrays, _ = self.train_on_views(weights, phase, 0)
        return {name: arrays[name] for name in weights}

    def check_reply(self, reply: Reply) -> None:
        super().check_reply(reply)
        if arrays := reply.arrays.get("dictionary"):
            count = min(len(arrays.get("projections", ())), self.options.samples, reply.examples)
            shape = count, self.options.width
            check(arrays, {"projections": (shape, "float32")}, "the client's dictionary")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        self.state.sent |= {
            c: reply.arrays["dictionary"] for c, reply in replies.items() if "dictionary" in reply.arrays
        }
        return super().aggregate_fit(round, replies)

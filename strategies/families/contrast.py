"""Methods whose clients train an encoder without labels, on two views of each example."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from fedhet.algorithms.contrast import nt_xent
from fedhet.data import Examples
from fedhet.data.views import random_views, two_views
from fedhet.methods import registry
from fedhet.methods.sharing import BODY, NetworkDescription, Sharing
from fedhet.models.representation import Representation
from fedhet.server import Arrays, Options, State, Traits, in_order, option
from fedhet.training import Phase, Step

from .at_server import PublicAtServer, build_at_server

P = TypeVar("P", bound=Options)
S = TypeVar("S", bound=State)


def _beside_head(network: NetworkDescription, name: str) -> bool:
    """Return whether the array `name` is of the head or of a module beside it."""
    return name.startswith(network.head.removesuffix("head"))


ENCODER = Sharing(lambda network: lambda name: None if _beside_head(network, name) else name)
"""All arrays but those of the head and of the modules beside it, such as the projection head."""

NETWORK = Sharing(
    lambda network: (
        lambda name: name if not _beside_head(network, name) or name.startswith(f"{network.head}.") else None
    )
)
"""All arrays but those of the modules beside the head."""


class ViewsKeys(Options):
    """Properties of methods whose clients train without labels, on views, with modules beside the head."""

    without = ("augment",)
    changes_heads = True


@dataclass(frozen=True)
class EncoderKeys(ViewsKeys):
    """Keys of methods whose clients train an encoder only; a linear classifier is trained for each evaluation."""

    width: int = option(128, "width of the projection head", at_least=1, at_most=2**16)
    projector: Literal["shared", "own"] = option("shared", "projection head: averaged (shared), or each client's own")
    probe: Literal["own", "public"] = option(
        "own", "labels of the linear classifier that is evaluated: the client's own, or the public dataset's"
    )
    labels: float = option(
        1.0, "fraction of a client's examples whose labels are used", above=0, at_most=1, needs={"probe": ("own",)}
    )
    probe_epochs: int = option(100, "number of epochs of the linear classifier", at_least=1)
    probe_learning_rate: float = option(0.01, "learning rate of the linear classifier's Adam", above=0)


def encoder_traits(keys: EncoderKeys) -> Traits:
    """Return the traits of methods that average encoders which are trained without labels."""
    return Traits(
        networks="equal",
        shares=BODY if keys.projector == "shared" else ENCODER,
        common_init=True,
        public="labelled" if keys.probe == "public" else "none",
        predicts="a linear classifier on the encoder",
    )


def contrast_of_views(step: Step, phi: Representation, temperature: float, dictionary: Tensor | None = None) -> Tensor:
    """Return the NT-Xent loss of a step's two views, which are also compared with a `dictionary` (m, width)."""
    first, second = step.beside("projector", phi, step.captured["phi"]).chunk(2)
    return nt_xent(first, second, temperature, dictionary)


class ViewsAtServer(PublicAtServer[P, S]):
    """Base class of strategies whose server trains a network like the clients' on views of the public dataset."""

    copies = 8

    def train_on_views(
        self, weights: Arrays, phase_of: Callable[[Representation], Phase], round: int
    ) -> tuple[Arrays, dict[str, float]]:
        """Train a client's network, starting from `weights`, whose other arrays are as initialized.

        `phase_of` returns the phase, given the network with its representation. Mini-batches have two views of each
        example, as at clients. Returns all its arrays, and the metric `server_loss`; if training diverges, `weights`
        and no metric.
        """
        config = self.config
        public = self.public
        client = in_order(self.state.clients)[0]
        network = build_at_server(lambda: self.run.network_like(client, adapted=True), config.seed)
        labels = torch.zeros(len(public), dtype=torch.long) if public.labels is None else public.labels
        phi = Representation(network, registry.client_side(self.method.name).head_of(config), config.representation)
        phase = replace(phase_of(phi), augment=two_views(random_views), task_weight=0.0)
        return self.train_on_public(network, weights, phase, Examples(public.inputs, labels), round)

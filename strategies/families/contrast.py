"""Methods whose clients train an encoder without labels, on two views of each example."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fedhet.errors import ConfigError
from fedhet.methods.sharing import BODY, NetworkDescription, Sharing
from fedhet.server import Config, Options, Traits, option


def _encoder(network: NetworkDescription) -> Callable[[str], str | None]:
    # What lies beside the head, such as the projection head, is not shared, either.
    place = f"{network.head.removesuffix('head')}"
    return lambda name: None if name.startswith(place) else name


ENCODER = Sharing(_encoder)
"""All arrays but those of the head and of what lies beside it (`fedhet.client_apps.families.contrast.Beside`)."""


@dataclass(frozen=True)
class ViewsKeys(Options):
    """Keys of methods whose clients train without labels; a linear classifier is trained for each evaluation."""

    without = ("augment",)
    changes_heads = True
    width: int = option(128, "width of the projection head", at_least=1, at_most=2**16)
    projector: Literal["shared", "own"] = option("shared", "projection head: averaged (shared), or each client's own")
    probe: Literal["own", "public"] = option(
        "own", "labels of the linear classifier that is evaluated: the client's own, or the public dataset's"
    )
    labels: float = option(1.0, "fraction of a client's examples whose labels are used", above=0, at_most=1)
    probe_epochs: int = option(100, "number of epochs of the linear classifier", at_least=1)
    probe_learning_rate: float = option(0.01, "learning rate of the linear classifier's Adam", above=0)

    def check(self, config: Config) -> None:
        """Check that `labels` is 1 if labels are the public dataset's; raise a ConfigError otherwise."""
        if self.probe == "public" and self.labels < 1:
            key = f"{config.family}.labels = {self.labels}"
            raise ConfigError(f"{key} has no effect if {config.family}.probe = public: set one of them")


def views_traits(keys: ViewsKeys) -> Traits:
    """Return the traits of methods that average encoders which are trained without labels."""
    return Traits(
        networks="equal",
        shares=BODY if keys.projector == "shared" else ENCODER,
        common_init=True,
        public="labelled" if keys.probe == "public" else "none",
        predicts="a linear classifier on the encoder",
    )

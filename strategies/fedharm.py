"""FedHARM (Kastellos et al., 2024, algorithm 1): networks learn similar descriptors of public images.

The descriptor d_i(x) of an image x has, for each block of client i's network, the activations that matter most for the
image's class (equation 1). a is the key `alpha`:

    client i:  w_i = argmin_w  sum_x a CE(f_w(x), y) + (1 - a) (1 - cos(d_w(x), D(x))) over public images   (shared)
    client i:  w_i = argmin_w  L_i(w) over private examples, and sends its descriptors d_i(x)               (private)
    server:    D(x) = mean_i d_i(x)

A message starts the shared phase of the previous round and the private phase of its own; the last one only the former.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from fedhet.algorithms.alignment.targets import check_sent, pack_all, target_of, unpack_all
from fedhet.errors import ConfigError
from fedhet.messages import Arrays, Payload, Reply, WireError
from fedhet.server import METRICS, ArraysBy, FederatedStrategy, Options, State, Traits, in_order, method, option
from fedhet.utils.randomness import torch_generator

from .families.scores import distance_metric


@dataclass(frozen=True)
class Keys(Options):
    uses = ("batch-norm",)  # Statistics are re-estimated after the shared phase.

    align: Literal["cosine", "spectral"] = option(
        "cosine",
        "what is aligned: descriptors by cosine (the paper's), or representations by FedHeNN's spectral target",
        needs={"alpha": {"below": 1}},
        at_need="spectral",
    )
    alpha: float = option(
        0.5,
        "weight of the task's loss on the public dataset, 1 - alpha of the distance; 0: no labels are needed",
        at_least=0,
        at_most=1,
        at_need=0.0,
    )
    divide: bool = option(False, "divide the public dataset's loss by alpha", needs={"alpha": {"above": 0, "below": 1}})
    blocks: str = option(
        "stages",
        "blocks to align: stages (layers of one spatial size), or module names a,b,c,d;... with one list per network",
        needs={"align": ("cosine",), "alpha": {"below": 1}},
    )
    slots: str = option(
        "128,256,512,1024",
        "lengths of the blocks' parts of a descriptor, from shallow to deep",
        needs={"align": ("cosine",), "alpha": {"below": 1}},
    )
    public_steps: int = option(0, "number of public steps per round; 0: as many epochs as on private data", at_least=0)

    def __post_init__(self) -> None:
        if not all(part.strip().isdecimal() and int(part) for part in self.slots.split(",")):
            raise ConfigError(f"fedharm.slots = {self.slots!r}: must be positive whole numbers separated by commas")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of values that each block of the network contributes to a descriptor, from the key `slots`."""
        return tuple(map(int, self.slots.split(",")))

    @property
    def parts(self) -> int:
        """Number of arrays that a client sends: class scores (`align = spectral`), or the descriptors of each block."""
        return 1 if self.align == "spectral" else len(self.lengths)


def traits(keys: Keys) -> Traits:
    """Return what FedHARM needs and exchanges, which depends on the values of its keys."""
    sends = {"distance": METRICS}
    if keys.alpha < 1:
        sends["sent"] = "posteriors" if keys.align == "spectral" else "descriptors"
    public: Literal["labelled", "inputs"] = "labelled" if keys.alpha else "inputs"
    other_arrays: Literal["mean", ""] = "mean" if sends.get("sent") == "descriptors" else ""
    inside: Literal["representation", ""] = "representation" if keys.align == "spectral" else ""
    return Traits(keeps="model", public=public, other_arrays=other_arrays, sends=sends, inside=inside)


@dataclass
class Descriptors(State):
    """The state of FedHARM: `sent` has, by client, descriptors of public images (posteriors if `align = spectral`)."""

    sent: ArraysBy = field(default_factory=dict)


@method(
    "fedharm",
    traits,
    Keys,
    client="fedhet.client_apps.fedharm:FedHARM",
    common={
        "rounds": 10,
        "local-epochs": 25,
        "closing-epochs": 25,
        "batch-size": 128,
        "optimizer": "adam",
        "learning-rate": 0.01,
        "lr-schedule": "one-cycle",
        "public-samples": 5000,
    },
    own={"closing-epochs": 5, "fedharm.divide": True},
)
class FedHARM(FederatedStrategy[Keys, Descriptors]):
    """FedHARM: the average of the clients' descriptors (most important activations) of public images."""

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        common = Payload()
        if round > 1:
            common.values["shared"] = True
            if target := pack_all(self.target(round)):
                common.arrays["target"] = target
        if self.sends_in(round):
            common.values["tell"] = True
        return dict.fromkeys(clients, common)

    def check_reply(self, reply: Reply) -> None:
        reply.values.number("distance", 0.0)
        if self.sends_in(self.state.round + 1):
            self.unpacked(reply.arrays.get("sent", {}))

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        sent = {client: reply.arrays["sent"] for client, reply in replies.items() if "sent" in reply.arrays}
        self.state.sent = self.state.sent | sent
        return distance_metric(replies.values(), "alignment")

    def sends_in(self, round: int) -> bool:
        return "sent" in self.traits.sends and round != self.run.last_round

    def target(self, round: int) -> list[Tensor]:
        """Return, for each block, the mean of the clients' descriptors (n, width) of n images; [] if none were sent.

        With `align = spectral`, return [Z], where images with similar predictions have similar rows in Z (n, k); see
        `cluster_rows`, whose random numbers depend on `round`.
        """
        sent = [self.unpacked(self.state.sent[client]) for client in in_order(self.state.sent)]
        if not sent:
            return []
        generator = torch_generator(self.config.seed, "parallel analysis", round)
        return target_of(self.options.align, sent, generator=generator)

    def unpacked(self, sent: Arrays) -> list[Tensor]:
        keys = self.options
        try:
            parts = unpack_all(sent, keys.parts)
            check_sent(keys.align, parts, self.state.public_size, keys.lengths)
        except ValueError as error:
            raise WireError(f"the client's descriptors are invalid ({error}): check the client's mods") from error
        return parts

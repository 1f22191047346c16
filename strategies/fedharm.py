"""Strategy of FedHARM: the mean of the clients' descriptors of public images (Kastellos et al., 2024, algorithm 1).

A descriptor of an image has, for each block of a network, the activations that matter most for the image's class.
Clients send descriptors in their replies, and receive the mean in the next message, with which they train on the public
images. Weights are not sent. In the last message, clients receive the mean for a final round of training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fedhet.algorithms.alignment.targets import check_sent, pack_all, target_of, unpack_all
from fedhet.messages import Arrays, Payload, Reply, WireError
from fedhet.methods.included.fedharm import FedHARMOptions, fedharm
from fedhet.server import ArraysBy, FederatedStrategy, State, in_order
from fedhet.utils.randomness import torch_generator

from .families.scores import distance_metric


@dataclass
class FedHARMState(State):
    """FedHARM's state: `sent` has, by client, activations of public images (class posteriors if `align = spectral`)."""

    sent: ArraysBy = field(default_factory=dict)


class FedHARM(FederatedStrategy[FedHARMOptions, FedHARMState]):
    """FedHARM: the average of the clients' descriptors (most important activations) of public images."""

    method = fedharm

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        common = Payload()
        if round > 1:
            common.values["shared"] = True
            if target := pack_all(self.target(round)):
                common.arrays["target"] = target
        if self._sends(round):
            common.values["tell"] = True
        return dict.fromkeys(clients, common)

    def check_reply(self, reply: Reply) -> None:
        reply.values.number("distance", 0.0)
        if self._sends(self.state.round + 1):
            self._unpacked(reply.arrays.get("sent", {}))

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        self.state.sent = self.state.sent | {c: r.arrays["sent"] for c, r in replies.items() if "sent" in r.arrays}
        return distance_metric(replies.values(), "alignment")

    def _sends(self, round: int) -> bool:
        return "sent" in self.traits.sends and round != self.run.last_round

    def target(self, round: int) -> list[Tensor]:
        """Return, for each block, the mean of the clients' descriptors (n, width) of n images; [] if none were sent.

        With `align = spectral`, return [Z], where images with similar predictions have similar rows in Z (n, k); see
        `cluster_rows`, whose random numbers depend on `round`.
        """
        sent = [self._unpacked(self.state.sent[client]) for client in in_order(self.state.sent)]
        if not sent:
            return []
        generator = torch_generator(self.config.seed, "parallel analysis", round)
        return target_of(self.options.align, sent, generator=generator)

    def _unpacked(self, sent: Arrays) -> list[Tensor]:
        settings = self.options
        try:
            parts = unpack_all(sent, settings.parts)
            check_sent(settings.align, parts, self.state.public_size, settings.lengths)
        except ValueError as error:
            raise WireError(f"the client's descriptors are invalid ({error}): check the client's mods") from error
        return parts

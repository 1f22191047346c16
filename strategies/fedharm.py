"""FedHARM, server side: the mean of what clients make of shared images (Kastellos et al., 2024, algorithm 1).

One exchange a round: descriptors come up in the reply, and their mean goes down with the next message, which begins
with the shared phase. So the shared phase of the last round is the closing round. No weights travel.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.errors import FedhetError
from fedhet.methods import fedharm
from fedhet.randomness import torch_generator
from fedhet.representations.descriptors import agreement
from fedhet.representations.packing import Factor, pack_all, unpack_all
from fedhet.representations.shared_images import check_told, target_of
from fedhet.server import ArraysBy, FederatedStrategy, State, in_order
from fedhet.task import Metric
from fedhet.wire import Arrays, Payload, Reply, WireError, check, to_tensor

log = logging.getLogger("flwr").getChild("fedhet")

MOST_PIXELS = 2**18
"""Of a heat map, which is drawn in the report."""


@dataclass
class FedHARMState(State):
    """Descriptors and facts that clients sent.

    Attributes:
        told: each client's newest descriptors, features or posteriors, as they travel; who is absent keeps his.
        slots: how many slots of each block each client has.
        cosines: of the rounds so far, for the report: `round`, and by block `same` and `other`.
        heat: each client's heat maps of one image, by block.
        alignments: how the blocks of each architecture were found that clients disclosed, by its name, for the report.
    """

    told: ArraysBy = field(default_factory=dict)
    slots: dict[str, list[int]] = field(default_factory=dict)
    cosines: list[dict[str, Any]] = field(default_factory=list)
    heat: ArraysBy = field(default_factory=dict)
    alignments: dict[str, Any] = field(default_factory=dict)


class FedHARM(FederatedStrategy[fedharm.FedHARMParameters, FedHARMState]):
    """F_E,j = 1/N sum_i F^i_E,j: for each image and slot, over the clients that have the slot."""

    method = fedharm.method
    state_class = FedHARMState

    def admit(self, reply: Reply) -> None:
        """Its blocks may be smaller than the slots: it fills fewer of them, which is said once.

        Raises:
            FedhetError: it does not say how many, or what it tells of its blocks does not fit.
        """
        own = self.parameters
        if not own.aligns or own.align == "spectral":
            return
        slots = reply.values.counts("slots")
        if len(slots) != len(own.lengths) or not all(0 < n <= most for n, most in zip(slots, own.lengths, strict=True)):
            raise FedhetError(f"its blocks fill {slots[:9]} of the slots {own.slots}")
        if own.align == "cosine" and (short := [n for n, k in enumerate(own.lengths) if slots[n] < k]):
            told = ", ".join(f"block {n + 1}: {slots[n]} of {own.lengths[n]}" for n in short)
            log.warning(
                "client %s fills fewer slots than fedharm.slots has, its blocks are smaller: %s", reply.client, told
            )
        self.state.slots = {**self.state.slots, reply.client: slots}
        if measured := reply.arrays.get("alignment"):
            found: dict[str, Any] = {name: reply.values.texts(name) for name in ("reference", "blocks")}
            found["chosen"] = reply.values.counts("chosen", at_most=len(found["blocks"]) - 1)
            if not len(found["chosen"]) == len(found["reference"]) == len(own.lengths):
                raise WireError(f"its alignment is of other than {len(own.lengths)} blocks")
            spec = (len(found["reference"]), len(found["blocks"])), "float32"
            check(measured, {"angles": spec, "divergences": spec}, "its alignment of blocks")
            found |= {name: array.tolist() for name, array in measured.items()}
            self.state.alignments = self.state.alignments | {reply.report.architecture: found}

    # ---- a round

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        """From the second round on the target on the shared images; and whether to tell what the next is made of."""
        payloads = super().configure_fit(round, clients)
        values = {**({"shared": True} if round > 1 else {}), **({"tell": True} if self._tells(round) else {})}
        target = pack_all(self.target(round), fedharm.DTYPE) if round > 1 and self.travels else {}
        for payload in payloads.values():
            payload.values |= values
            if target:
                payload.arrays["target"] = target
        return payloads

    def check_reply(self, reply: Reply) -> None:
        """Check that what was asked for is there, of the shared images, and in as many slots as the client said."""
        super().check_reply(reply)
        reply.values.number("distance", 0.0)
        if self._tells(self.state.round + 1):
            self._unpacked(reply.client, reply.arrays.get("told", {}))

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Keep what clients told; how alike it is, what the shared phase came to, how far from the target it ended."""
        self.state.told = self.state.told | {c: r.arrays["told"] for c, r in replies.items() if "told" in r.arrays}
        return {**self._aligned(replies), **self._agreement(round, replies)}

    @property
    def travels(self) -> bool:
        """Whether clients tell the server anything of the shared images."""
        return "told" in self.traits.tells

    def _tells(self, round: int) -> bool:
        """Whether clients tell with this round's reply what the next target is made of; of the last none is made."""
        return self.travels and round != self.run.last_round

    def target(self, round: int) -> list[Factor]:
        """Return the target, part by part, of what all clients sent."""
        told = {client: self._unpacked(client, self.state.told[client]) for client in in_order(self.state.told)}
        if not told:
            return []
        generator = torch_generator(self.config.seed, "parallel analysis", round)
        parts = list(told.values()) if self.aggregator.plain else [self._combined(told)]
        return target_of(self.parameters.align, parts, error=fedharm.ERROR, generator=generator)

    def _combined(self, told: Mapping[str, Sequence[Tensor]]) -> list[Tensor]:
        """Descriptors by the key `aggregation`, slot by slot of those who have it: for each block (n, K_b)."""
        slots = {
            client: {
                (block, slot): values.numpy()
                for block, part in enumerate(parts)
                for slot, values in enumerate(part.unbind(1))
            }
            for client, parts in told.items()
        }
        found = self.aggregator.average_arrays(slots)
        widths = [max(part.shape[1] for part in block) for block in zip(*told.values(), strict=True)]
        return [
            torch.stack([to_tensor(found[block, slot]) for slot in range(width)], 1)
            for block, width in enumerate(widths)
        ]

    def _unpacked(self, client: str, told: Arrays) -> list[Tensor]:
        """Return a client's descriptors, features or posteriors.

        Raises:
            WireError: it cannot be read, or does not fit.
        """
        own = self.parameters
        try:
            parts = unpack_all(told, own.parts, fedharm.DTYPE)
            check_told(own.align, parts, self.state.public_size, self.state.slots.get(client, ()))
        except ValueError as error:
            raise WireError(f"its descriptors of the shared images cannot be used: {error}") from error
        return parts

    def _aligned(self, replies: Mapping[str, Reply]) -> dict[str, float]:
        """The mean accuracy after the shared phase, and the mean alignment in it."""
        found: dict[str, float] = {}
        for name in (fedharm.BETWEEN, f"common-{fedharm.BETWEEN}"):
            if measured := [reply.measured[name].metric for reply in replies.values() if name in reply.measured]:
                found[f"{self.run.metric}-after-shared"] = Metric.total(measured).value
        distances = [r.payload.values["distance"] for r in replies.values() if "distance" in r.payload.values]
        return found | ({"alignment": 1 - float(np.mean(distances))} if distances else {})

    def _agreement(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """How much more alike descriptors of the same image are than those of different ones (see `agreement`)."""
        told = {client: reply.arrays["told"] for client, reply in replies.items() if "told" in reply.arrays}
        if self.parameters.align != "cosine" or len(told) < 2 or self.state.public_size < 2:
            return {}
        same, other = agreement([self._unpacked(client, told[client]) for client in told])
        self.state.cosines = [*self.state.cosines, {"round": round, "same": same, "other": other}]
        return {"cosine-same": same[-1], "cosine-other": other[-1], "cosine-gap": same[-1] - other[-1]}

    # ---- report

    def take_last(self, reply: Reply) -> None:
        """Keep the heat maps: (h, w), one a block, with numbers from 0 to 1."""
        heat, blocks = reply.arrays.get("heat", {}), [str(block) for block in range(len(self.parameters.lengths))]
        check(heat, {name: (heat[name].shape[-2:], "float16") for name in blocks if name in heat}, "its heat maps")
        if any(array.ndim != 2 or not 0 < array.size <= MOST_PIXELS for array in heat.values()):
            raise WireError("its heat maps are no images")
        if any(array.min() < 0 or array.max() > 1 for array in heat.values()):
            raise WireError("its heat maps have numbers that are not from 0 to 1")
        if heat:
            self.state.heat = {**self.state.heat, reply.client: heat}

    def matrices(self) -> dict[str, Any]:
        """Cosines by round and block; how blocks were found; heat maps of one image, a client of each architecture."""
        found: dict[str, Any] = {"cosines": {"rounds": self.state.cosines}} if self.state.cosines else {}
        if self.state.alignments:
            found["block-alignment"] = {"architectures": self.state.alignments}
        chosen = {self.state.clients[c].architecture or c: c for c in reversed(in_order(self.state.heat))}
        if chosen:
            public = self.public_dataset()
            clients = in_order(chosen.values())
            found["grad-cam"] = {
                "image": None if public is None else public.inputs[0].tolist(),
                "clients": clients,
                "architectures": [self.state.clients[client].architecture for client in clients],
                "maps": [[heat.tolist() for heat in self.state.heat[client].values()] for client in clients],
            }
        return found
